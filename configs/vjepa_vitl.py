"""V-JEPA with a ViT-L: 16 frames of 256 pixels, tubelets of 2 x 16 x 16, two families of masks, bfloat16.

    jepa-jax train --config=vjepa_vitl --workdir=runs/vjepa_vitl --config.data.dir=DIR

DIR holds train and test with videos (pip install 'jepa_jax[video]'). Rates, decay, momentum, masks and predictor follow
the released config of V-JEPA 2, whose batch of 3,072 takes 128 GPUs; here 24 per GPU on 8. Not shared: positions are
sines instead of rotary, masks have fixed counts of patches. Never trained here: no figure is claimed.
"""

import ml_collections

from jepa_jax.config import default_config
from jepa_jax.configs import ijepa_cifar10


def get_config() -> ml_collections.ConfigDict:
    config = default_config("vjepa", "vit_large")
    config.method.mean = (0.485, 0.456, 0.406)
    config.method.std = (0.229, 0.224, 0.225)
    config.model.patch_size = 16
    config.data.source = "clips"
    config.data.image_size = 256
    config.data.max_frames = 16
    config.data.frame_stride = 7  # about 4 frames per second
    config.data.batch_size = 192
    config.data.num_workers = 16
    config.optim.lr = 5.25e-4
    config.optim.batch_scaling = "sqrt"
    config.optim.reference_batch = 3072
    config.optim.weight_decay = 0.04
    config.optim.epochs = 240.0
    config.optim.warmup_epochs = 40.0
    config.train.precision = "bfloat16"
    config.train.remat = "light"
    config.eval.batch_size = 32
    return ijepa_cifar10.of_patches(config)
