"""V-JEPA on moving shapes with a small ViT, in minutes on a CPU.

    jepa-jax train --config=vjepa_quickstart --workdir=runs/vjepa_quickstart

The shapes are drawn on the fly. `target_r2` says how well a ridge probe reads their mean position from the features:
no better than before training at this length (docs/results/video.md).
"""

import ml_collections

from jepa_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("vjepa", "vit")
    config.model.width = 64
    config.model.depth = 3
    config.model.heads = 2
    config.model.patch_size = 4
    config.model.cls_token = False
    config.model.positions = "sincos"
    config.method.tubelet_frames = 4
    config.method.predictor_width = 48
    config.method.predictor_depth = 2
    config.method.predictor_heads = 3
    config.method.ema_start = 0.99
    config.method.ema_end = 1.0
    config.data.source = "moving_shapes"
    config.data.image_size = 32
    config.data.channels = 1
    config.data.max_frames = 8
    config.data.num_train = 6144
    config.data.num_test = 512
    config.data.batch_size = config.optim.reference_batch = 32
    config.optim.epochs = 1.0
    config.optim.lr = 1e-3
    config.optim.warmup_epochs = 0.1
    config.eval.weights = "target"
    config.eval.max_images = 512
    return config
