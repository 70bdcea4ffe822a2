"""EmberFormer on WildfireSpreadTS: where fire is active on the next day, 5 days of history, one fold of 12.

    for fold in $(seq 0 11); do
      jepa-jax train --config=emberformer_wsts --config.data.fold=$fold --workdir=runs/wsts_$fold --config.data.dir=DIR
    done

DIR holds the HDF5 files of the data set (pip install 'jepa_jax[hdf5,sklearn]'; docs/guides/wildfire.md). The figure to
compare is `average_precision`, mean and deviation over the folds. Never run: no result is claimed. As published: folds
by year, squares of 128 pixels with the most fire of ten, 10,000 steps of 64, and which pixels and days are scored. Not
as published: the model; each day of training has one fixed square, not turned or mirrored; maps are clipped at five
deviations, degrees have a cosine beside the sine, and wind is the mean of a square; test fires are read in squares.
"""

import ml_collections

from jepa_jax.config import default_config
from jepa_jax.config.recipe import by_machine


def get_config() -> ml_collections.ConfigDict:
    config = default_config("emberformer", "emberformer", model__decoder="unet")
    config.method.loss.positive_weight = 1.0
    config.model.wind_input = "vector"
    config.model.fire_input = "pixels"
    config.model.refine_inputs = True
    config.model.patch_size = 4
    config.model.decoder_widths = (64, 128, 256)
    config.data.source = "wsts"
    config.data.dir = "data/wsts"
    config.data.channels = 42
    config.data.image_size = 128
    config.data.max_frames = 5
    config.data.validation = 0.1
    config.data.batch_size = 64
    config.data.num_workers = 8
    config.optim.lr = 1e-3
    config.optim.reference_batch = config.data.batch_size
    config.optim.weight_decay = 1e-4
    config.optim.clip_norm = 1.0
    config.train.max_steps = 10_000
    config.train.keep_best = "validation_average_precision"
    config.train.precision = by_machine("bfloat16", "float32")
    config.eval.batch_size = 64
    return config
