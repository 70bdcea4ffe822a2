"""I-JEPA on a folder of photographs, of any size, with labels or without: 224-pixel crops of the full photographs.

    jepa-jax train --config=photos_ijepa --workdir=runs/photos --config.data.dir=FOLDER

On a machine with an NVIDIA GPU ViT-S/16, batch 128, bfloat16; on a CPU ViT-Ti/16, batch 16, which is for trying things
out. Mean and standard deviation are those of the photographs, and the workers are as many as the cores allow. Masks,
crops and schedules are those of ijepa_in1k_vitb. No accuracy is claimed: it depends on the photographs.
"""

from jepa_jax.config.recipe import by_machine


def get_config() -> dict:
    return dict(
        base="ijepa_in1k_vitb",
        method=dict(predictor_width=192, predictor_depth=4, predictor_heads=6),
        model=dict(name=by_machine("vit_small", "vit_tiny")),
        data=dict(
            source="folder",
            dir="data/photos",
            crops="loader",
            statistics="set",
            shorter_side=256,
            batch_size=by_machine(128, 16),
            num_workers=-1,
        ),
        optim=dict(lr=5e-4, warmup_lr=1e-5, epochs=100.0, warmup_epochs=5.0),
        train=dict(precision=by_machine("bfloat16", "float32")),
        eval=dict(max_images=5000),
    )
