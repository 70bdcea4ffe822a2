"""V-JEPA on moving shapes with a small ViT, in minutes on a CPU.

    jepa-jax train --config=vjepa_quickstart --workdir=runs/vjepa_quickstart

The shapes are drawn on the fly. `target_r2` says how well a ridge probe reads their mean position from the features:
no better than before training at this length (docs/results/video.md).
"""

import ml_collections

from jepa_jax.config import default_config
from jepa_jax.configs import ijepa_cifar10, moving_shapes_cpu


def get_config() -> ml_collections.ConfigDict:
    config = default_config("vjepa", "vit")
    config.model.width = 64
    config.model.depth = 3
    config.model.heads = 2
    config.model.patch_size = 4
    config.method.tubelet_frames = 4
    config.method.predictor_width = 48
    config.method.predictor_depth = 2
    config.method.predictor_heads = 3
    config.method.ema_start = 0.99
    config.method.ema_end = 1.0
    config.data.num_train = 6144
    config.data.batch_size = config.optim.reference_batch = 32
    config.optim.lr = 1e-3
    return moving_shapes_cpu.of_moving_shapes(ijepa_cifar10.of_patches(config))
