"""SimCLR on CIFAR-10 as solo-learn runs it: ResNet-18, 1000 epochs, batch 256, bfloat16.

    jepa-jax train --config=simclr_cifar10 --workdir=runs/simclr_cifar10 --config.data.dir=DIR

Projector, temperature, views, LARS with its clip, warm-up and length are those of solo-learn's cifar/simclr.yaml, which
publishes 90.74 % online linear probe. The blur has 13 taps, as its widest sigma needs, and the projector has batch norm
between its layers, unlike there. What else differs is listed in byol_cifar10. Not reproduced here. One GPU.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import byol_cifar10


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(byol_cifar10.get_config(), method__name="simclr")
    config.method.projector = (2048, 256)
    config.method.temperature = 0.2
    config.data.augment.jitter.brightness = 0.8
    config.data.augment.jitter.contrast = 0.8
    config.data.augment.jitter.saturation = 0.8
    config.data.augment.jitter.hue = 0.2
    config.data.augment.blur.probability = 0.5
    config.data.augment.blur.taps = 13
    config.optim.lr = 0.4
    config.optim.weight_decay = 1e-4
    return config
