"""VICReg on CIFAR-10 as solo-learn runs it: ResNet-18, 1000 epochs, batch 256, weights 25/25/1, bfloat16.

    jepa-jax train --config=vicreg_cifar10 --workdir=runs/vicreg_cifar10 --config.data.dir=DIR

Loss and its weights, projector, augmentation, statistics, LARS (rate, trust coefficient, decay), warm-up and length are
those of solo-learn, which publishes 92.07 % online linear probe. Unlike it: the stem pads by 1 pixel instead of 2,
crops are resized bilinearly instead of bicubically, and compute is in bfloat16 instead of float16. Not reproduced here.
One GPU.
"""

import ml_collections

from jepa_jax.configs import image_jepa


def get_config() -> ml_collections.ConfigDict:
    config = image_jepa.get_config()
    config.method.invariance_weight = 25.0
    config.method.std_weight = 25.0
    config.method.cov_weight = 1.0
    config.method.covariance_normalisation = "dimensions"
    config.data.augment.std = (0.247, 0.2435, 0.2616)
    config.optim.epochs = 1000.0
    config.eval.every_epochs = 10
    config.eval.knn_every_epochs = 50
    return config
