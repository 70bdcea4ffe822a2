"""I-JEPA on ImageNet-1k from shards whose images have a shorter side of 256 pixels: crops of the full photographs.

    jepa-jax train --config=ijepa_in1k_shards --workdir=runs/ijepa_shards --config.data.dir=DIR

DIR is written once by `jepa-jax prepare-data shards IMAGENET --shorter_side=256 --dir=DIR`: a fraction of the bytes to
read and decode, and views are cut from the whole photograph instead of its centre. Everything else is ijepa_in1k_vitb.
For 8 GPUs. Never trained: no accuracy is claimed.
"""

import ml_collections

from jepa_jax.configs import ijepa_in1k_vitb


def get_config() -> ml_collections.ConfigDict:
    config = ijepa_in1k_vitb.get_config()
    config.data.source = "shards"
    config.data.crops = "loader"
    config.data.shorter_side = 256
    return config
