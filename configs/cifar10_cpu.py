"""Image JEPA on all of CIFAR-10 within 24 CPU-minutes, on a laptop.

    jepa-jax train --config=cifar10_cpu --config.data.dir=DIR --workdir=runs/cifar10_cpu

Cost: 16.5 to 18.6 CPU-minutes in all. Expected: 67.9 % linear probe (67.4 to 68.9, 3 seeds), 56.4 % untrained; see
docs/results/cifar10_cpu.md.
"""


def get_config() -> dict:
    return dict(
        method=dict(name="image_jepa", loss="sigreg", views=4, per_view_statistics=False, projector=(512, 64)),
        model=dict(name="patchnet"),
        data=dict(
            source="cifar10",
            dir="data/cifar10",
            batch_size=128,
            augment=dict(
                crop=dict(size=16, scale=(0.15, 0.4)), jitter=dict(probability=0.8), grayscale=dict(probability=0.2)
            ),
        ),
        optim=dict(lr=2e-3, beta2=0.99, epochs=4.0, warmup_epochs=0.2, warmup_lr=0.0),
        eval=dict(every_epochs=0, knn_every_epochs=0, calibration_images=2000, batch_size=20),
    )
