"""Multi-crop on the embedded shapes, minutes on a CPU: the quickstart with 2 large and 6 small views of each image.

    jepa-jax train --config=multicrop_quickstart --workdir=runs/multicrop_quickstart

Small views have a quarter of the pixels and are compared with the mean of the large ones. To compare with two views:
the same command with --config=quickstart --config.method.views=2, with as many epochs as take the same CPU time.
Two views were ahead when both had about 2.5 CPU-minutes (docs/results/methods.md).
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import quickstart


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(quickstart.get_config(), method__view_groups=("small",))
    config.method.views = 2
    config.method.small.count = 6
    config.method.small.crop.size = 8
    config.method.small.crop.scale = (0.05, 0.3)
    return config
