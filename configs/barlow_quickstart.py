"""Barlow Twins on the embedded shapes, minutes on a CPU.

    jepa-jax train --config=barlow_quickstart --workdir=runs/barlow_quickstart

Differs from byol_quickstart in the method alone. Cost: 2.3 CPU-minutes. Linear probe 57.9 %, 59.5 % on held-out
training images, untrained 20.2 %; no collapse warning (one seed, two busy cores).
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import byol_quickstart


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(byol_quickstart.get_config(), method__name="barlow_twins")
    config.method.redundancy_weight = 0.02
    config.method.projector = (256, 256)
    return config
