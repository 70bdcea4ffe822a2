"""LeJEPA on a folder of photographs, of any size, with labels or without: crops of the full photographs.

    jepa-jax train --config=photos_lejepa --workdir=runs/photos --config.data.dir=FOLDER

Two crops of 224 and six of 96 pixels; each photograph is decoded once for all. On a machine with an NVIDIA GPU
ViT-S/16, batch 128, bfloat16; on a CPU ViT-Ti/16, batch 16, two small crops, which is for trying things out. Mean and
standard deviation are those of the photographs, and the workers are as many as the cores allow. Loss, augmentation and
schedules are those of lejepa_imagenette. No accuracy is claimed: it depends on the photographs.
"""

from jepa_jax.config.recipe import by_machine


def get_config() -> dict:
    return dict(
        base="lejepa_imagenette",
        method=dict(small=dict(count=by_machine(6, 2))),
        model=dict(name=by_machine("vit_small", "vit_tiny")),
        data=dict(
            dir="data/photos",
            image_size=224,
            crops="loader",
            statistics="set",
            shorter_side=256,
            batch_size=by_machine(128, 16),
            num_workers=-1,
        ),
        optim=dict(epochs=100.0),
        train=dict(precision=by_machine("bfloat16", "float32")),
        eval=dict(max_images=5000),
    )
