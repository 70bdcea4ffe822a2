"""DINO on Imagenette as lightly's benchmark runs it: ResNet-18, 2 large and 6 small crops, 800 epochs.

    jepa-jax train --config=dino_imagenette --workdir=runs/dino_imagenette --config.data.dir=DIR

Head, 2,048 prototypes, temperatures, a constant momentum of .99, two views of 128 pixels (blur 1 and .1, the second one
solarized at .2) and six of 64 (blur .5) are those of lightly's Imagenette benchmark, which publishes 88.1 % for k-NN
after 800 epochs; optimizer and length are those of simclr_imagenette, as there. What differs is listed there, and the
head has no batch norm. Not reproduced here. One GPU.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import simclr_imagenette


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(simclr_imagenette.get_config(), method__name="dino", method__view_groups=("second", "local"))
    config.method.views = 1
    config.method.second.role = "both"
    config.method.second.blur.probability = 0.1
    config.method.second.solarize.probability = 0.2
    config.method.local.count = 6
    config.method.local.crop.size = 64
    config.method.local.crop.scale = (0.05, 0.4)
    config.method.local.blur.probability = 0.5
    config.method.prototypes = 2048
    config.method.teacher_temperature = 0.04
    config.method.frozen_last_layer = 0.0
    config.method.ema_start = 0.99
    config.method.ema_end = 0.99
    config.data.augment.crop.scale = (0.4, 1.0)
    config.data.augment.jitter.saturation = 0.2
    config.data.augment.blur.probability = 1.0
    return config
