"""BYOL on the embedded shapes, minutes on a CPU.

    jepa-jax train --config=byol_quickstart --workdir=runs/byol_quickstart

Cost: 2.5 CPU-minutes. Linear probe 44.4 %, 43.9 % on held-out training images, untrained 20.2 %;
no collapse warning (one seed, two busy cores).
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import quickstart


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(quickstart.get_config(), method__name="byol")
    config.method.predictor = 256
    config.method.ema_start = 0.97
    config.method.projector = (256, 64)
    config.optim.epochs = 10.0
    config.eval.every_epochs = 5
    config.eval.knn_every_epochs = 0
    return config
