"""LeJEPA on ImageNet-1k: ViT-B/14, 2 large and 6 small crops, 100 epochs, batch 512, bfloat16.

    jepa-jax train --config=lejepa_in1k --workdir=runs/lejepa_in1k --config.data.dir=DIR

DIR holds imagenet2012 prepared for tensorflow-datasets. Views, augmentation, lambda (0.05), slices, AdamW, rate, decay
and the end of the cosine are those that LeJEPA's authors recommend for a ViT. Encoder, batch, projector, warm-up and
length are ours; crops are taken from a centre crop of 256 pixels. For 8 GPUs. Never trained: no accuracy is claimed.
"""

import ml_collections

from jepa_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("image_jepa", "vit_base", method__loss="sigreg", method__view_groups=("small",))
    config.method.projector = (2048, 2048, 512)
    config.method.num_slices = 1024
    config.method.small.count = 6
    config.method.small.crop.size = 98
    config.method.small.crop.scale = (0.05, 0.3)
    config.method.per_view_statistics = False
    config.model.pool = "cls"
    config.model.patch_size = 14
    config.data.source = "tfds:imagenet2012"
    config.data.image_size = 256
    config.data.batch_size = 512
    config.data.num_workers = -1
    config.data.augment.crop.size = 224
    config.data.augment.crop.scale = (0.3, 1.0)
    config.data.augment.jitter.probability = 0.8
    config.data.augment.grayscale.probability = 0.2
    config.data.augment.blur.probability = 0.5
    config.data.augment.solarize.probability = 0.2
    config.data.augment.mean = (0.485, 0.456, 0.406)
    config.data.augment.std = (0.229, 0.224, 0.225)
    config.optim.lr = 5e-4
    config.optim.reference_batch = config.data.batch_size
    config.optim.epochs = 100.0
    config.optim.warmup_epochs = 10.0
    config.optim.end_lr = 5e-7
    config.train.precision = "bfloat16"
    return config
