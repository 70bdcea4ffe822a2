"""I-JEPA on CIFAR-10 that a CPU can train within 24 CPU-minutes: a small ViT with whitened 8-pixel patches.

    jepa-jax train --config=ijepa_cifar10 --workdir=runs/ijepa_cifar10 --config.data.dir=DIR

Linear probe on the means of quadrants (512 numbers) 58.5 % (58.8 and 58.2, two seeds), untrained 53.7 %; 20 and 22
CPU-minutes on one core (docs/results/masked.md).
"""

import ml_collections

from jepa_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("ijepa", "vit", model__embedding="whitened")
    config.method.predictor_width = 64
    config.method.predictor_depth = 2
    config.method.predictor_heads = 2
    config.method.mask.min_context = 3
    config.method.ema_start = 0.99
    config.data.batch_size = 64
    config.data.source = "cifar10"
    config.optim.lr = 2e-3
    config.optim.warmup_epochs = 0.5
    config.optim.beta2 = 0.95
    config.optim.weight_decay = 0.04
    config.optim.weight_decay_end = 0.1
    config.eval.pool = "grid2"
    config.eval.every_epochs = 2
    config.eval.knn_every_epochs = 0
    return of_masked_images(of_patches(config))


def of_patches(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns the config with what I-JEPA and V-JEPA share: patches alone, at sines, judged by their slow copy."""
    config.model.cls_token = False
    config.model.positions = "sincos"
    config.eval.weights = "target"
    return config


def of_masked_images(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns the config with what I-JEPA and masked autoencoders share: large crops, and a rate that falls to 1e-6."""
    config.data.augment.crop.scale = (0.3, 1.0)
    config.optim.reference_batch = config.data.batch_size
    config.optim.end_lr = 1e-6
    config.eval.weights = "target"
    return config
