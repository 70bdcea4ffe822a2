"""LeJEPA on Imagenette: ViT-S/16, 2 large and 6 small crops, 200 epochs, batch 128, bfloat16, for one GPU.

    jepa-jax train --config=lejepa_imagenette --workdir=runs/lejepa_imagenette --config.data.dir=DIR

DIR holds the folders train and val of Imagenette. Encoder, crops, augmentation, AdamW, rate, decay, batch, warm-up and
length are those of stable-pretraining's benchmark, which publishes 87.1 % for its best online linear probe and 85.4 %
for k-NN. Unlike it: the loss is LeJEPA's, 0.95 invariance + 0.05 SIGReg, where SIGReg is the mean over views (there:
invariance + 0.02 SIGReg, with the views of all images as one sample); no drop-path, no linear layer before the
projector; crops are taken from a centre crop of 256 pixels (with data.crops=loader from the whole photograph); bfloat16
instead of float16. Not reproduced here.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import lejepa_in1k


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(lejepa_in1k.get_config(), model__name="vit_small")
    config.method.small.crop.size = 96
    config.model.patch_size = 16
    config.data.source = "folder"
    config.data.dir = "data/imagenette"
    config.data.batch_size = 128
    config.data.num_workers = 8
    config.optim.lr = 4e-4
    config.optim.reference_batch = config.data.batch_size
    config.optim.epochs = 200.0
    config.optim.warmup_epochs = 2.0
    config.optim.warmup_lr = 4e-6
    config.optim.end_lr = 4e-6
    return config
