"""Masked autoencoder on CIFAR-10: ViT-Tiny with 4-pixel patches, 200 epochs, batch 512, bfloat16, for one GPU.

    jepa-jax train --config=mae_cifar10 --workdir=runs/mae_cifar10 --config.data.dir=DIR

`jepa-jax plan --config=mae_cifar10` says what it needs. Never trained to its end here: no accuracy is claimed.
mae_quickstart trains in minutes on a CPU.
"""


def get_config() -> dict:
    return dict(
        method=dict(name="mae", mask_ratio=0.75, decoder_width=128, decoder_depth=2, decoder_heads=4),
        model=dict(name="vit_tiny", patch_size=4),
        data=dict(source="cifar10", batch_size=512, augment=dict(crop=dict(scale=(0.3, 1.0)))),
        optim=dict(lr=1.5e-3, beta2=0.95, weight_decay=0.05, epochs=200.0, warmup_epochs=10.0, end_lr=1e-6),
        train=dict(precision="bfloat16"),
        eval=dict(weights="target", every_epochs=10, knn_every_epochs=50),
        log=dict(pictures_every_epochs=10),
    )
