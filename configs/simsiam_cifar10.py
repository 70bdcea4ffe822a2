"""SimSiam on CIFAR-10 as solo-learn runs it: ResNet-18, 1000 epochs, batch 256, bfloat16.

    jepa-jax train --config=simsiam_cifar10 --workdir=runs/simsiam_cifar10 --config.data.dir=DIR

Heads, the predictor's constant rate, views, SGD with decay on every parameter, warm-up and length are those of
solo-learn's cifar/simsiam.yaml; it publishes no accuracy of it. The blur has 13 taps, as its widest sigma needs. What
differs is listed in byol_cifar10. Not reproduced here. One GPU.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import byol_cifar10


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(byol_cifar10.get_config(), method__name="simsiam", optim__name="sgd")
    config.data.augment.jitter.saturation = 0.4
    config.data.augment.blur.probability = 0.5
    config.data.augment.blur.taps = 13
    config.optim.lr = 0.5
    config.optim.weight_decay = 1e-5
    config.optim.decay_all = True
    return config
