"""Video JEPA on moving shapes: predicts the latents of 6 frames, in five CPU-minutes.

    jepa-jax train --config=moving_shapes_cpu --workdir=runs/moving_shapes_cpu

Cost: 296 CPU-seconds. Average precision of detections 2 and 6 frames ahead .205 and .101 (one seed), of a copy of the
last frame .107 and .040. With method.steps=1 it is higher at this length (docs/results/video.md).
"""

import ml_collections

from jepa_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("video_jepa")
    config.method.stem_width = 16
    config.method.widths = (16, 32, 16)
    config.method.strides = (2, 2, 1)
    config.method.predictor_widths = (32, 64)
    config.method.projector = ()
    config.method.loss.variance = 10.0
    config.method.loss.covariance = 10.0
    config.data.num_train = 8192
    config.data.batch_size = config.optim.reference_batch = 16
    config.optim.lr = 2e-3
    config.optim.weight_decay = 1e-4
    config.eval.pool = "grid2"
    return of_moving_shapes(config)


def of_moving_shapes(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns the config with what moving_shapes_cpu and vjepa_quickstart share: 8 frames of 32 pixels, one epoch."""
    config.data.source = "moving_shapes"
    config.data.image_size = 32
    config.data.channels = 1
    config.data.max_frames = 8
    config.data.num_test = 512
    config.optim.epochs = 1.0
    config.optim.warmup_epochs = 0.1
    config.eval.max_images = 512
    return config
