"""Video JEPA on Moving MNIST in the size of EB-JEPA: full resolution, four steps, 50 epochs, batch 64.

    jepa-jax train --config=video_jepa_mnist --workdir=runs/video_jepa_mnist --config.data.dir=mnist_test_seq.npy

About 160 PFLOP, for one GPU. Never trained here: no figure is claimed. Published (arXiv:2602.03604): mean average
precision .607 of detections up to 7 steps ahead, by a detection head that is trained along instead of our readout.
"""

import ml_collections

from jepa_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("video_jepa", optim__schedule="constant")
    config.data.source = "moving_mnist"
    config.data.image_size = 64
    config.data.channels = 1
    config.data.max_frames = 10
    config.data.batch_size = config.optim.reference_batch = 64
    config.data.num_workers = 4
    config.optim.epochs = 50.0
    config.optim.warmup_epochs = 0.0
    config.optim.lr = 1e-3
    config.optim.weight_decay = 0.0
    config.train.seed = 2025
    config.eval.pool = "grid2"
    config.eval.batch_size = 64
    config.eval.max_images = 2048
    return config
