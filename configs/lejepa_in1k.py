"""LeJEPA on ImageNet-1k: ViT-B/14, 2 large and 6 small crops, 100 epochs, batch 512, bfloat16.

    jepa-jax train --config=lejepa_in1k --workdir=runs/lejepa_in1k --config.data.dir=DIR

DIR holds imagenet2012 prepared for tensorflow-datasets. Views, augmentation, lambda (0.05), slices, AdamW, rate, decay
and the end of the cosine are those that LeJEPA's authors recommend for a ViT. Encoder, batch, projector, warm-up and
length are ours; crops are taken from a centre crop of 256 pixels. For 8 GPUs. Never trained: no accuracy is claimed.
"""

AUGMENT = dict(
    crop=dict(size=224, scale=(0.3, 1.0)),
    jitter=dict(probability=0.8),
    grayscale=dict(probability=0.2),
    blur=dict(probability=0.5),
    solarize=dict(probability=0.2),
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)


def get_config() -> dict:
    return dict(
        method=dict(
            name="image_jepa",
            loss="sigreg",
            num_slices=1024,
            view_groups=("small",),
            small=dict(count=6, crop=dict(size=98, scale=(0.05, 0.3))),
            per_view_statistics=False,
            projector=(2048, 2048, 512),
        ),
        model=dict(name="vit_base", patch_size=14, pool="cls"),
        data=dict(source="tfds:imagenet2012", image_size=256, batch_size=512, num_workers=16, augment=AUGMENT),
        optim=dict(lr=5e-4, weight_decay=0.05, epochs=100.0, warmup_epochs=10.0, end_lr=5e-7),
        train=dict(precision="bfloat16"),
    )
