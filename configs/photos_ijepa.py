"""I-JEPA on a folder of photographs, of any size, with labels or without: 224-pixel crops of the full photographs.

    jepa-jax train --config=photos_ijepa --workdir=runs/photos --config.data.dir=FOLDER

On a machine with an NVIDIA GPU ViT-S/16, batch 128, bfloat16; on a CPU ViT-Ti/16, batch 16, which is for trying things
out. Mean and standard deviation are those of the photographs, and the workers are as many as the cores allow. Masks,
crops and schedules are those of ijepa_in1k_vitb. No accuracy is claimed: it depends on the photographs.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.config.recipe import by_machine
from jepa_jax.configs import ijepa_in1k_vitb


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(ijepa_in1k_vitb.get_config(), model__name=by_machine("vit_small", "vit_tiny"))
    config.method.predictor_width = 192
    config.method.predictor_depth = 4
    config.method.predictor_heads = 6
    config.optim.lr = 5e-4
    config.optim.epochs = 100.0
    config.optim.warmup_epochs = 5.0
    config.optim.warmup_lr = 1e-5
    return for_photographs(config)


def for_photographs(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns the config with what photos_ijepa and photos_lejepa share: data, and a batch sized by the machine."""
    config.data.source = "folder"
    config.data.dir = "data/photos"
    config.data.crops = "loader"
    config.data.statistics = "set"
    config.data.shorter_side = 256
    config.data.batch_size = by_machine(128, 16)
    config.optim.reference_batch = config.data.batch_size
    config.data.num_workers = -1
    config.train.precision = by_machine("bfloat16", "float32")
    config.eval.max_images = 5000
    return config
