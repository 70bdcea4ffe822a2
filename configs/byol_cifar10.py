"""BYOL on CIFAR-10 as solo-learn runs it: ResNet-18, 1000 epochs, batch 256, bfloat16.

    jepa-jax train --config=byol_cifar10 --workdir=runs/byol_cifar10 --config.data.dir=DIR

Heads, momentum (.99 to 1), both views (the second one solarized), statistics, LARS with its clip (rate 1, trust,
decay), warm-up and length are those of solo-learn's cifar/byol.yaml, which publishes 92.58 % online linear probe.
Unlike it: the stem pads by 1 pixel instead of 2, crops are resized bilinearly instead of bicubically, compute is in
bfloat16 instead of float16. Not reproduced here. One GPU.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import image_jepa


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(image_jepa.get_config(), method__name="byol", method__view_groups=("second",))
    config.method.ema_start = 0.99
    config.method.second.solarize.probability = 0.2
    config.data.augment.crop.scale = (0.08, 1.0)
    config.data.augment.solarize.probability = 0.0
    config.data.augment.std = (0.247, 0.2435, 0.2616)
    config.optim.lr = 1.0
    config.optim.weight_decay = 1e-5
    config.optim.epochs = 1000.0
    config.eval.every_epochs = 10
    config.eval.knn_every_epochs = 50
    return config
