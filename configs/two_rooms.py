"""Two Rooms as published for PLDM: 65-pixel frames, IMPALA, latents of 512 numbers, 12 epochs, for one GPU.

    jepa-jax train --config=two_rooms --workdir=runs/two_rooms

Published with random walls: 97 +- 2 % success with MPPI, 96 +- 2 % with CEM (20 episodes, three seeds and epochs). Here
success is that of CEM on 300 tasks in layouts that no training walk was made in. Not reproduced here: a training is
4.2 PFLOP, and the planner costs 88 TFLOP per episode.
"""

import ml_collections

from jepa_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("world_model", "impala")
    config.method.latent_width = 512
    config.method.pixel_mean = (0.0026, 0.0989)
    config.method.pixel_std = (0.0369, 0.2986)
    config.method.control.planner = "cem"
    config.method.control.energy = "sum"
    config.method.control.horizon = 90
    config.method.control.samples = 200
    config.method.control.iterations = 20
    config.method.control.elites = 20
    config.method.control.spread = 0.83
    config.method.control.smoothness = 0.0
    config.data.image_size = 65
    config.data.num_train = 100_000
    config.data.num_test = 4096
    config.data.max_frames = 17
    config.data.batch_size = 384
    config.data.num_workers = 8
    config.optim.lr = 1e-3
    config.optim.epochs = 12.0
    config.optim.warmup_epochs = 1.2
    config.train.precision = "bfloat16"
    return of_two_rooms(config)


def of_two_rooms(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns the config with what two_rooms and two_rooms_cpu share: the task and the end of the schedule."""
    config.method.clip_norm = 2.0
    config.method.pixel_scaling = "frame"
    config.method.control.environment = "two_rooms"
    config.data.source = "two_rooms"
    config.data.channels = 2
    config.optim.end_lr = 1e-5
    config.optim.weight_decay = 1e-5
    return config
