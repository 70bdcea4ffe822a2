"""EMP-SSL on CIFAR-10: 20 small crops of each image, total coding rate, ResNet-18, 30 epochs, batch 100, bfloat16.

    jepa-jax train --config=emp_ssl_cifar10 --workdir=runs/emp_ssl_cifar10 --config.data.dir=DIR
    jepa-jax evaluate --workdir=runs/emp_ssl_cifar10

As the released code of Tong et al. (2023): crops, augmentation, projector, loss, rate, decay, trust coefficient, cosine
without warm-up, length. Unlike it: momentum does not look ahead, compute is in bfloat16, and features are the 512
numbers of the encoder instead of the 4,096 of the projector's first layer. The published 93.1 % (30 epochs) averages
those over random augmented crops. `evaluate` measures both the whole image (level 0) and the mean over `eval.crops`
fixed crops without other augmentation (level 1). Not reproduced here.
"""


def get_config() -> dict:
    return dict(
        base="image_jepa",
        method=dict(loss="tcr", views=20, per_view_statistics=False, projector=(4096, 4096, 1024)),
        data=dict(
            batch_size=100,
            augment=dict(
                crop=dict(scale=(0.25, 0.25), ratio=(1.0, 1.0)),
                jitter=dict(saturation=0.4, hue=0.2),
                blur=dict(probability=0.1),
                mean=(0.5, 0.5, 0.5),
                std=(0.5, 0.5, 0.5),
            ),
        ),
        optim=dict(larc_trust=0.005, epochs=30.0, warmup_epochs=0.0, warmup_lr=1e-6),
        eval=dict(crops=32),
    )
