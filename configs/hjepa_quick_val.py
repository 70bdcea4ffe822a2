"""Hierarchical JEPA, quick validation: ViT-Tiny/16 on CIFAR-10 at 224 pixels, 2 levels, 5 epochs.

    jepa-jax train --config=hjepa_quick_val --workdir=runs/hjepa_quick_val --config.data.dir=DIR

6,526,848 trainable parameters of 12,051,264 (jepa-jax describe). Images are enlarged to 224 pixels on the device.
Encoder, predictor, level weights, masks, crop, flip, colour jitter, AdamW, rate, schedule, batch and seed are those of
the published run. Ours by design: levels pool the 2-D grid, masked tokens are dropped, views are resized bilinearly
and normalised by the statistics of CIFAR-10, GPUs compute in bfloat16, and the VICReg term compares two views
of one image, with weights of its own. The published run names the term and ignores it, and collapsed; here collapse is
watched.
"""

import ml_collections

from jepa_jax.config import default_config
from jepa_jax.config.recipe import by_machine


def get_config() -> ml_collections.ConfigDict:
    config = default_config("hjepa", "vit_tiny")
    config.method.predictor_depth = 2
    config.method.predictor_heads = 4
    config.method.mask.target_scale = (0.15, 0.25)
    config.model.patch_size = 16
    config.data.source = "cifar10"
    config.data.batch_size = 32
    config.data.augment.crop.size = 224
    config.data.augment.crop.scale = (0.8, 1.0)
    config.data.augment.jitter.probability = 1.0
    config.data.augment.jitter.brightness = 0.12
    config.data.augment.jitter.contrast = 0.12
    config.data.augment.jitter.saturation = 0.06
    config.data.augment.jitter.hue = 0.03
    config.train.precision = by_machine("bfloat16", "float32")
    config.optim.epochs = 5.0
    config.optim.warmup_lr = 0.0
    config.optim.end_lr = 1e-6
    config.optim.lr = 1e-4
    config.optim.reference_batch = config.data.batch_size
    config.optim.beta2 = 0.95
    config.optim.weight_decay = 0.04
    config.optim.clip_norm = 3.0
    config.train.seed = 42
    config.eval.weights = "target"
    config.eval.knn_every_epochs = 5
    return config
