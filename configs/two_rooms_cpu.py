"""Two Rooms on a CPU: 33-pixel frames, each action repeated four times, latents of 32 numbers.

jepa-jax train --config=two_rooms_cpu --workdir=runs/two_rooms_cpu

Three seeds: 96.7, 92.0 and 98.0 % of 300 held-out tasks (95.7 % with the true dynamics, 0.0 to 0.7 % untrained), in 346
to 353 CPU-seconds with evaluation (docs/results/world_models.md).
"""

import ml_collections

from jepa_jax.config import default_config
from jepa_jax.configs import two_rooms


def get_config() -> ml_collections.ConfigDict:
    config = default_config("world_model", "frame_mlp", method__predictor="residual")
    config.method.latent_width = 32
    config.method.predictor_hidden = (256, 256)
    config.method.unroll = 4
    config.method.starts = "all"
    config.method.loss.prediction = 6.0
    config.method.loss.similarity = 4.0
    config.method.loss.inverse_dynamics = 60.0
    config.method.loss.covariance = 25.0
    config.method.control.energy = "last"
    config.method.control.horizon = 24
    config.method.control.executed = 2
    config.method.control.samples = 48
    config.method.control.iterations = 3
    config.model.widths = (256, 256)
    config.model.strips = 2
    config.data.image_size = 33
    config.data.num_train = 96 * 5_100
    config.data.num_test = 1024
    config.data.validation = 0.02
    config.data.max_frames = 9
    config.data.frame_stride = 4
    config.data.batch_size = 96
    config.optim.lr = 5e-3
    config.optim.epochs = 1.0
    config.optim.warmup_epochs = 0.05
    config.eval.every_epochs = 0
    config.train.checkpoint_every_steps = 500
    return two_rooms.of_two_rooms(config)
