"""Masked autoencoder on CIFAR-10: ViT-Tiny with 4-pixel patches, 200 epochs, batch 512, bfloat16, for one GPU.

    jepa-jax train --config=mae_cifar10 --workdir=runs/mae_cifar10 --config.data.dir=DIR

`jepa-jax plan --config=mae_cifar10` says what it needs. Never trained to its end here: no accuracy is claimed.
mae_quickstart trains in minutes on a CPU.
"""

import ml_collections

from jepa_jax.config import default_config
from jepa_jax.configs.ijepa_cifar10 import of_masked_images


def get_config() -> ml_collections.ConfigDict:
    config = default_config("mae", "vit_tiny")
    config.model.patch_size = 4
    config.data.source = "cifar10"
    config.data.batch_size = 512
    config.optim.lr = 1.5e-3
    config.optim.epochs = 200.0
    config.optim.warmup_epochs = 10.0
    config.optim.beta2 = 0.95
    config.train.precision = "bfloat16"
    config.eval.every_epochs = 10
    config.eval.knn_every_epochs = 50
    config.log.pictures_every_epochs = 10
    return of_masked_images(config)
