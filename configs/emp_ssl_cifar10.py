"""EMP-SSL on CIFAR-10: 20 small crops of each image, total coding rate, ResNet-18, 30 epochs, batch 100, bfloat16.

    jepa-jax train --config=emp_ssl_cifar10 --workdir=runs/emp_ssl_cifar10 --config.data.dir=DIR
    jepa-jax evaluate --workdir=runs/emp_ssl_cifar10

As the released code of Tong et al. (2023): crops, augmentation, projector, loss, rate, decay, trust coefficient, cosine
without warm-up, length. Unlike it: momentum does not look ahead, the blur has 3 taps at 32 pixels, which limits sigma
to about .8 (data.augment.blur.taps), compute is in bfloat16, and features are the 512 numbers of the encoder instead of
the 4,096 of the projector's first layer. The published 93.1 % (30 epochs) averages those over random
augmented crops. `evaluate` measures both the whole image (level 0) and the mean over `eval.crops` fixed crops without
other augmentation (level 1). Not reproduced here.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import image_jepa


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(image_jepa.get_config(), method__loss="tcr")
    config.method.views = 20
    config.method.per_view_statistics = False
    config.method.projector = (4096, 4096, 1024)
    config.data.batch_size = 100
    config.data.augment.crop.scale = (0.25, 0.25)
    config.data.augment.crop.ratio = (1.0, 1.0)
    config.data.augment.jitter.saturation = 0.4
    config.data.augment.jitter.hue = 0.2
    config.data.augment.blur.probability = 0.1
    config.data.augment.mean = (0.5, 0.5, 0.5)
    config.data.augment.std = (0.5, 0.5, 0.5)
    config.optim.reference_batch = config.data.batch_size
    config.optim.epochs = 30.0
    config.optim.warmup_epochs = 0.0
    config.optim.warmup_lr = 1e-6
    config.optim.larc_trust = 0.005
    config.eval.crops = 32
    return config
