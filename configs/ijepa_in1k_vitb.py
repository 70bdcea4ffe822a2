"""I-JEPA on ImageNet-1k: ViT-B/16, predictor of width 384 and depth 6, 600 epochs, batch 2048, bfloat16.

    jepa-jax train --config=ijepa_in1k_vitb --workdir=runs/ijepa_vitb --config.data.dir=DIR

DIR holds imagenet2012 prepared for tensorflow-datasets. For 8 GPUs. Never trained here: no accuracy is claimed.

Shared with I-JEPA's released ImageNet configs: rate, weight decay and EMA with their schedules, batch, sizes of masks,
crops of 30 to 100 % of the area, no flip, no colour. Predictor and number of epochs are the paper's for ViT-B/16. Not
shared: crops come from a centre crop instead of the whole photograph, masks have fixed counts of patches (the context
is 39.8 % of them, where truncation leaves 27.0 % in the released code: method.mask.context_tokens=53), one pass
predicts all targets, and initial weights follow Xavier's rule.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import ijepa_cifar10_gpu


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(ijepa_cifar10_gpu.get_config(), model__name="vit_base")
    config.method.predictor_width = 384
    config.method.predictor_heads = 12
    config.model.patch_size = 16
    config.data.source = "tfds:imagenet2012"
    config.data.dir = ""
    config.data.pipeline = "grain"
    config.data.image_size = 224
    config.data.batch_size = 2048
    config.data.num_workers = -1
    config.data.augment.mean = (0.485, 0.456, 0.406)
    config.data.augment.std = (0.229, 0.224, 0.225)
    config.optim.epochs = 600.0
    config.optim.warmup_epochs = 40.0
    config.optim.warmup_lr = 2e-4
    config.optim.reference_batch = config.data.batch_size
    return config
