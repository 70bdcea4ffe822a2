"""Image JEPA on all of CIFAR-10 within 24 CPU-minutes, on a laptop.

    jepa-jax train --config=cifar10_cpu --config.data.dir=DIR --workdir=runs/cifar10_cpu

Cost: 18 to 20 CPU-minutes in all, on one core. Linear probe 74.4 % (73.9 to 74.8, three seeds), untrained 58.5 %; with
`jepa-jax evaluate --pool=grid2` (2,048 numbers) 78.1 % (77.9 to 78.4), untrained 64.6 %.
See docs/results/cifar10_cpu.md.
"""


def get_config() -> dict:
    muon = dict(name="muon", lr=4e-3, beta2=0.99, weight_decay=0.0, adam_lr_factor=0.5)
    return dict(
        method=dict(name="image_jepa", loss="infonce", views=4, per_view_statistics=False, projector=(512, 128)),
        model=dict(name="patchnet", widths=(96, 160, 256), all_layers=True),
        data=dict(
            source="cifar10",
            dir="data/cifar10",
            batch_size=128,
            augment=dict(
                crop=dict(size=16, scale=(0.2, 0.8)), jitter=dict(probability=0.8), grayscale=dict(probability=0.2)
            ),
        ),
        optim=dict(**muon, epochs=6.0, warmup_epochs=0.3, warmup_lr=0.0),
        eval=dict(every_epochs=0, knn_every_epochs=0, calibration_images=2000, batch_size=20),
    )
