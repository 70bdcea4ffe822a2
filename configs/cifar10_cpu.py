"""Image JEPA on all of CIFAR-10 within 24 CPU-minutes, on a laptop.

    jepa-jax train --config=cifar10_cpu --config.data.dir=DIR --workdir=runs/cifar10_cpu

Cost: 18 to 20 CPU-minutes in all, on one core. Linear probe 74.4 % (73.9 to 74.8, three seeds), untrained 58.5 %; with
`jepa-jax evaluate --pool=grid2` (2,048 numbers) 78.1 % (77.9 to 78.4), untrained 64.6 %.
See docs/results/cifar10_cpu.md.
"""

import ml_collections

from jepa_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("image_jepa", "patchnet", method__loss="infonce", optim__name="muon")
    config.method.projector = (512, 128)
    config.method.views = 4
    config.method.per_view_statistics = False
    config.model.all_layers = True
    config.model.widths = (96, 160, 256)
    config.data.source = "cifar10"
    config.data.dir = "data/cifar10"
    config.data.batch_size = 128
    config.data.augment.crop.size = 16
    config.data.augment.crop.scale = (0.2, 0.8)
    config.data.augment.jitter.probability = 0.8
    config.data.augment.grayscale.probability = 0.2
    config.optim.lr = 4e-3
    config.optim.reference_batch = config.data.batch_size
    config.optim.epochs = 6.0
    config.optim.warmup_epochs = 0.3
    config.optim.warmup_lr = 0.0
    config.optim.beta2 = 0.99
    config.optim.weight_decay = 0.0
    config.optim.adam_lr_factor = 0.5
    config.eval.every_epochs = config.eval.knn_every_epochs = 0  # measured before and after training alone
    config.eval.calibration_images = 2000
    config.eval.batch_size = 20
    return config
