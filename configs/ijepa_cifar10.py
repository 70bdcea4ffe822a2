"""I-JEPA on CIFAR-10 that a CPU can train within 24 CPU-minutes: a small ViT with whitened 8-pixel patches.

    jepa-jax train --config=ijepa_cifar10 --workdir=runs/ijepa_cifar10 --config.data.dir=DIR

Linear probe on the means of quadrants (512 numbers) 58.5 % (58.8 and 58.2, two seeds), untrained 53.7 %; 20 and 22
CPU-minutes on one core (docs/results/masked.md).
"""


def get_config() -> dict:
    method = dict(
        name="ijepa", predictor_width=64, predictor_depth=2, predictor_heads=2, ema_start=0.99, mask=dict(min_context=3)
    )
    model = dict(
        name="vit", width=128, depth=4, heads=4, patch_size=8, cls_token=False, positions="sincos", embedding="whitened"
    )
    return dict(
        method=method,
        model=model,
        data=dict(source="cifar10", batch_size=64, augment=dict(crop=dict(scale=(0.3, 1.0)))),
        optim=dict(
            lr=2e-3, beta2=0.95, weight_decay=0.04, weight_decay_end=0.1, epochs=10.0, warmup_epochs=0.5, end_lr=1e-6
        ),
        eval=dict(weights="target", pool="grid2", every_epochs=2, knn_every_epochs=0),
    )
