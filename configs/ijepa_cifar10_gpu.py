"""I-JEPA on CIFAR-10 for one GPU: ViT-S with 4-pixel patches, predictor of width 192 and depth 6, 300 epochs, bfloat16.

    jepa-jax train --config=ijepa_cifar10_gpu --workdir=runs/ijepa_cifar10_gpu --config.data.dir=DIR

As I-JEPA's ImageNet recipe: masks, predictor half as wide as the encoder, crop, no flip, no colour, AdamW with growing
weight decay, momentum of the target. Patch size, batch, rate and length are ours. There is no published figure for this
recipe. Never trained to its end here: no accuracy is claimed. ijepa_cifar10 trains in minutes on a CPU.
"""


def get_config() -> dict:
    return dict(
        method=dict(name="ijepa", predictor_width=192, predictor_depth=6, predictor_heads=6),
        model=dict(name="vit_small", patch_size=4, cls_token=False, positions="sincos"),
        data=dict(
            source="cifar10",
            dir="data/cifar10",
            batch_size=512,
            pipeline="device",
            augment=dict(crop=dict(scale=(0.3, 1.0)), flip=dict(probability=0.0)),
        ),
        optim=dict(
            lr=1e-3,
            weight_decay=0.04,
            weight_decay_end=0.4,
            epochs=300.0,
            warmup_epochs=15.0,
            warmup_lr=1e-4,
            end_lr=1e-6,
        ),
        train=dict(precision="bfloat16"),
        eval=dict(weights="target", every_epochs=10, knn_every_epochs=50),
    )
