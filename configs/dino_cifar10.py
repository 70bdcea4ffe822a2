"""DINO on CIFAR-10 as solo-learn runs it: ResNet-18, 1000 epochs, batch 256, bfloat16.

    jepa-jax train --config=dino_cifar10 --workdir=runs/dino_cifar10 --config.data.dir=DIR

Head, 4,096 prototypes, momentum (.9995 to 1), temperatures, the first epoch without the last layer, both views, LARS,
warm-up and length are those of solo-learn's cifar/dino.yaml and its defaults, which publishes 89.52 % online linear
probe. The teacher's temperature rises for 50 epochs, as in its first versions. What differs is listed in byol_cifar10.
Not reproduced here. One GPU.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import byol_cifar10


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(byol_cifar10.get_config(), method__name="dino", method__view_groups=("second",))
    config.method.views = 1
    config.method.second.role = "both"
    config.method.second.solarize.probability = 0.2
    config.method.prototypes = 4096
    config.method.ema_start = 0.9995
    config.method.teacher_warmup = 50 / 1000
    config.method.frozen_last_layer = 1 / 1000
    config.optim.lr = 0.3
    config.optim.weight_decay = 1e-6
    return config
