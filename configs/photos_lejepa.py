"""LeJEPA on a folder of photographs, of any size, with labels or without: crops of the full photographs.

    jepa-jax train --config=photos_lejepa --workdir=runs/photos --config.data.dir=FOLDER

Two crops of 224 and six of 96 pixels; each photograph is decoded once for all. On a machine with an NVIDIA GPU
ViT-S/16, batch 128, bfloat16; on a CPU ViT-Ti/16, batch 16, two small crops, which is for trying things out. Mean and
standard deviation are those of the photographs, and the workers are as many as the cores allow. Loss, augmentation and
schedules are those of lejepa_imagenette. No accuracy is claimed: it depends on the photographs.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.config.recipe import by_machine
from jepa_jax.configs import lejepa_imagenette, photos_ijepa


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(lejepa_imagenette.get_config(), model__name=by_machine("vit_small", "vit_tiny"))
    config.method.small.count = by_machine(6, 2)
    config.data.image_size = 224
    config.optim.epochs = 100.0
    return photos_ijepa.for_photographs(config)
