"""EmberFormer on simulated fires, within 24 CPU-minutes.

    jepa-jax train --config=emberformer_cpu --workdir=runs/emberformer_cpu

Cost: 11 and 13 CPU-minutes, before gradient boosting was one of the baselines. Average precision of newly burning
pixels .398 and .403 (two seeds); gradient boosting per pixel .396, and .406 in a check elsewhere: no gain over it is
claimed (docs/results/emberformer.md). Needs pip install 'jepa_jax[sklearn]'.
"""

import ml_collections

from jepa_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("emberformer", "emberformer", model__decoder="unet")
    config.method.loss.positive_weight = 1.0
    config.method.lr_spatial = 3e-3
    config.model.wind_input = "vector"
    config.model.width = 32
    config.model.depth = 2
    config.model.mlp_width = 64
    config.model.decoder_widths = (32, 64)
    config.model.patch_size = 2
    config.model.refine_inputs = True
    config.model.dropout = 0.0
    config.model.fire_input = "pixels"
    config.data.source = "wildfire"
    config.data.num_train = 16384
    config.data.num_test = 1024
    config.data.frame_buckets = (4,)
    config.data.batch_size = 32
    config.data.validation = 0.0625
    config.data.max_frames = 6
    config.optim.epochs = 3.0
    config.optim.warmup_epochs = 0.1
    config.optim.lr = 3e-3
    config.optim.reference_batch = config.data.batch_size
    config.optim.weight_decay = 1e-4
    config.optim.clip_norm = 1.0
    config.train.keep_best = "validation_new_average_precision"
    config.eval.batch_size = 32
    config.log.pictures_every_epochs = 1
    return config
