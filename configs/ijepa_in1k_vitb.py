"""I-JEPA on ImageNet-1k: ViT-B/16, predictor of width 384 and depth 6, 600 epochs, batch 2048, bfloat16.

    jepa-jax train --config=ijepa_in1k_vitb --workdir=runs/ijepa_vitb --config.data.dir=DIR

DIR holds imagenet2012 prepared for tensorflow-datasets. For 8 GPUs. Never trained here: no accuracy is claimed.

Shared with I-JEPA's released ImageNet configs: rate, weight decay and EMA with their schedules, batch, sizes of masks,
crops of 30 to 100 % of the area, no flip, no colour. Predictor and number of epochs are the paper's for ViT-B/16. Not
shared: crops come from a centre crop instead of the whole photograph, masks have fixed counts of patches, one pass
predicts all targets, and initial weights follow Xavier's rule.
"""

IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def get_config() -> dict:
    return dict(
        base="ijepa_cifar10_gpu",
        method=dict(predictor_width=384, predictor_heads=12),
        model=dict(name="vit_base", patch_size=16),
        data=dict(
            source="tfds:imagenet2012",
            dir="",
            image_size=224,
            batch_size=2048,
            pipeline="grain",
            num_workers=16,
            augment=IMAGENET,
        ),
        optim=dict(warmup_lr=2e-4, epochs=600.0, warmup_epochs=40.0),
    )
