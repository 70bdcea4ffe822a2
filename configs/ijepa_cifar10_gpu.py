"""I-JEPA on CIFAR-10 for one GPU: ViT-S with 4-pixel patches, predictor of width 192 and depth 6, 300 epochs, bfloat16.

    jepa-jax train --config=ijepa_cifar10_gpu --workdir=runs/ijepa_cifar10_gpu --config.data.dir=DIR

As I-JEPA's ImageNet recipe: masks, predictor half as wide as the encoder, crop, no flip, no colour, AdamW with growing
weight decay, momentum of the target. Patch size, batch, rate and length are ours. There is no published figure for this
recipe. Never trained to its end here: no accuracy is claimed. ijepa_cifar10 trains in minutes on a CPU.
"""

import ml_collections

from jepa_jax.config import default_config
from jepa_jax.configs.ijepa_cifar10 import of_masked_images, of_patches


def get_config() -> ml_collections.ConfigDict:
    config = default_config("ijepa", "vit_small")
    config.method.predictor_width = 192
    config.method.predictor_heads = 6
    config.model.patch_size = 4
    config.data.source = "cifar10"
    config.data.dir = "data/cifar10"
    config.data.pipeline = "device"
    config.data.batch_size = 512
    config.data.augment.flip.probability = 0.0
    config.optim.epochs = 300.0
    config.optim.warmup_epochs = 15.0
    config.optim.warmup_lr = 1e-4
    config.optim.weight_decay = 0.04
    config.optim.weight_decay_end = 0.4
    config.optim.lr = 1e-3
    config.train.precision = "bfloat16"
    config.eval.every_epochs = 10
    config.eval.knn_every_epochs = 50
    return of_masked_images(of_patches(config))
