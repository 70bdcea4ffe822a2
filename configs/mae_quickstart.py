"""Masked autoencoder on the embedded shapes, minutes on a CPU, with pictures of its reconstructions.

    jepa-jax train --config=mae_quickstart --workdir=runs/mae_quickstart

Held-out reconstructions have 0.47 of the error of each image's visible mean; linear probe 83.9 %, untrained 44.0 %;
one seed, 12 CPU-minutes on two busy cores (docs/results/masked.md).
"""

import ml_collections

from jepa_jax.config import default_config
from jepa_jax.configs.ijepa_cifar10 import of_masked_images


def get_config() -> ml_collections.ConfigDict:
    config = default_config("mae", "vit")
    config.method.ema_momentum = 0.99
    config.method.mask_ratio = 0.5
    config.method.norm_pix = False
    config.method.decoder_width = 64
    config.model.positions = "sincos"
    config.model.width = 64
    config.model.depth = 3
    config.model.patch_size = 4
    config.data.num_train = 4096
    config.data.num_test = 1024
    config.data.augment.crop.probability = 0.0
    config.data.batch_size = 16
    config.data.augment.mean = (0.5, 0.5, 0.5)
    config.data.augment.std = (0.25, 0.25, 0.25)
    config.optim.epochs = 30.0
    config.optim.beta2 = 0.95
    config.optim.lr = 2e-3
    config.eval.every_epochs = 10
    config.log.every_steps = 32
    config.log.pictures_every_epochs = 10
    return of_masked_images(config)
