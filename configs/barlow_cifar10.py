"""Barlow Twins on CIFAR-10 as solo-learn runs it: ResNet-18, 1000 epochs, batch 256, bfloat16.

    jepa-jax train --config=barlow_cifar10 --workdir=runs/barlow_cifar10 --config.data.dir=DIR

Projector, lambda, the factor .1 of the loss (LARS does not scale biases and norms), both views, LARS, warm-up and
length are those of solo-learn's cifar/barlow.yaml, which publishes 92.10 % online linear probe. What differs is listed
in byol_cifar10. Not reproduced here. One GPU.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import byol_cifar10


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(byol_cifar10.get_config(), method__name="barlow_twins", method__view_groups=("second",))
    config.method.projector = (2048, 2048, 2048)
    config.method.loss_scale = 0.1
    config.method.second.solarize.probability = 0.2
    config.optim.lr = 0.3
    config.optim.weight_decay = 1e-4
    return config
