"""Image JEPA on CIFAR-10 with VICReg: ResNet-18, 300 epochs, batch 256, bfloat16.

    jepa-jax prepare-data cifar10 --dir=data/cifar10
    jepa-jax train --config=image_jepa --workdir=runs/image_jepa

Cost: 6.0 GFLOP per image (jepa-jax describe), one GPU. On a laptop see cifar10_cpu.

These are the values of EB-JEPA's default config: std 1 and cov 80, projector 2048-2048, LARC, rate, schedule, batch and
augmentation. No accuracy is published for them; the 90.12 % of EB-JEPA's VICReg are of cov 100 with a projector of
2048-1024, the best of a sweep. Not shared with it: the stem pads by 1 pixel instead of 2, the rate changes every step
and begins at its warm-up value, and the probe is solved after training. Not trained to its end here.
"""

import ml_collections

from jepa_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("image_jepa", "resnet18", method__loss="vicreg", optim__name="larc")
    config.data.source = "cifar10"
    config.data.dir = "data/cifar10"
    config.data.pipeline = "device"
    config.data.batch_size = 256
    config.data.augment.jitter.probability = 0.8
    config.data.augment.grayscale.probability = 0.2
    config.data.augment.solarize.probability = 0.1
    config.optim.lr = 0.3
    config.optim.reference_batch = config.data.batch_size
    config.optim.weight_decay = 1e-4
    config.optim.epochs = 300.0
    config.optim.warmup_epochs = 10.0
    config.optim.warmup_lr = 3e-5
    config.train.precision = "bfloat16"
    return config
