"""Image JEPA on CIFAR-10 with VICReg: ResNet-18, 300 epochs, batch 256, bfloat16.

    jepa-jax prepare-data cifar10 --dir=data/cifar10
    jepa-jax train --config=image_jepa --workdir=runs/image_jepa

Cost: 6.0 GFLOP per image (jepa-jax describe), one GPU. On a laptop see cifar10_cpu.

These are the values of EB-JEPA's default config: std 1 and cov 80, projector 2048-2048, LARC, rate, schedule, batch and
augmentation. No accuracy is published for them; the 90.12 % of EB-JEPA's VICReg are of cov 100 with a projector of
2048-1024, the best of a sweep. Not shared with it: the stem pads by 1 pixel instead of 2, the rate changes every step
and begins at its warm-up value, and the probe is solved after training. Not trained to its end here.
"""


def get_config() -> dict:
    return dict(
        method=dict(name="image_jepa", loss="vicreg"),
        model=dict(name="resnet18"),
        data=dict(
            source="cifar10",
            dir="data/cifar10",
            batch_size=256,
            pipeline="device",
            augment=dict(jitter=dict(probability=0.8), grayscale=dict(probability=0.2), solarize=dict(probability=0.1)),
        ),
        optim=dict(name="larc", lr=0.3, weight_decay=1e-4, epochs=300.0, warmup_epochs=10.0, warmup_lr=3e-5),
        train=dict(precision="bfloat16"),
    )
