"""Hierarchical JEPA on CIFAR-10 within 24 CPU-minutes: a small ViT with whitened 8-pixel patches, 2 levels.

    jepa-jax train --config=hjepa_cifar10_cpu --workdir=runs/hjepa_cifar10_cpu --config.data.dir=DIR

Linear probe on the means of quadrants (512 numbers) 57.0 % (56.3 and 57.7, two seeds), untrained 53.8 %; 13 and 14
CPU-minutes on busy cores. The encoder and optimizer of ijepa_cifar10, 5 epochs. The slow target alone keeps features
apart: with another encoder, a regulariser cost more than it brought (docs/results/masked.md).
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import ijepa_cifar10


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(ijepa_cifar10.get_config(), method__name="hjepa", method__regulariser="none")
    config.method.predictor_depth = 1
    config.optim.epochs = 5.0
    config.eval.every_epochs = 5
    return config
