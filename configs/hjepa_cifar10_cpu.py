"""Hierarchical JEPA on CIFAR-10 within 24 CPU-minutes: a small ViT with whitened 8-pixel patches, 2 levels.

    jepa-jax train --config=hjepa_cifar10_cpu --workdir=runs/hjepa_cifar10_cpu --config.data.dir=DIR

Linear probe on the means of quadrants (512 numbers) 57.7 % (one seed), untrained 53.7 %; 14 CPU-minutes on one core.
The encoder and optimizer of ijepa_cifar10, 5 epochs. The slow target alone keeps features apart: with another encoder,
a regulariser cost more than it brought (docs/results/masked.md).
"""


def get_config() -> dict:
    return dict(
        method=dict(
            name="hjepa",
            level_weights=(1.0, 0.5),
            predictor_depth=1,
            predictor_heads=2,
            mask=dict(min_context=3),
            ema_start=0.99,
            regulariser="none",
        ),
        model=dict(
            name="vit",
            width=128,
            depth=4,
            heads=4,
            patch_size=8,
            cls_token=False,
            positions="sincos",
            embedding="whitened",
        ),
        data=dict(source="cifar10", batch_size=64, augment=dict(crop=dict(scale=(0.3, 1.0)))),
        optim=dict(
            lr=2e-3, beta2=0.95, weight_decay=0.04, weight_decay_end=0.1, epochs=5.0, warmup_epochs=0.5, end_lr=1e-6
        ),
        eval=dict(weights="target", pool="grid2", every_epochs=5, knn_every_epochs=0),
    )
