"""Hierarchical JEPA on CIFAR-10 within 24 CPU-minutes: a small ViT with whitened 8-pixel patches, 2 levels.

    jepa-jax train --config=hjepa_cifar10_cpu --workdir=runs/hjepa_cifar10_cpu --config.data.dir=DIR

Linear probe on the means of quadrants (512 numbers) 57.0 % (56.3 and 57.7, two seeds), untrained 53.8 %; 13 and 14
CPU-minutes on busy cores. The encoder and optimizer of ijepa_cifar10, 5 epochs. The slow target alone keeps features
apart: with another encoder, a regulariser cost more than it brought (docs/results/masked.md).
"""


def get_config() -> dict:
    return dict(
        base="ijepa_cifar10",
        method=dict(
            name="hjepa",
            level_weights=(1.0, 0.5),
            predictor_depth=1,
            predictor_heads=2,
            ema_start=0.99,
            regulariser="none",
            mask=dict(min_context=3),
        ),
        optim=dict(epochs=5.0),
        eval=dict(every_epochs=5),
    )
