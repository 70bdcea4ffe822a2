"""Hierarchical JEPA, quick validation: ViT-Tiny/16 on CIFAR-10 at 224 pixels, 2 levels, 5 epochs.

    jepa-jax train --config=hjepa_quick_val --workdir=runs/hjepa_quick_val --config.data.dir=DIR

6,526,848 trainable parameters of 12,051,264 (jepa-jax describe). Images are enlarged to 224 pixels on the device.
The published run collapsed; its VICReg term was never used. Ours is, and the collapse watch says so if it happens.
Loss weights of the regulariser, crop and flip are ours, the rest is the published run's.
"""


def get_config() -> dict:
    return dict(
        method=dict(name="hjepa", predictor_depth=2, predictor_heads=4, mask=dict(target_scale=(0.15, 0.25))),
        model=dict(name="vit_tiny", patch_size=16),
        data=dict(source="cifar10", batch_size=32, augment=dict(crop=dict(size=224, scale=(0.3, 1.0)))),
        optim=dict(lr=1e-4, beta2=0.95, weight_decay=0.04, clip_norm=3.0, epochs=5.0, end_lr=1e-6),
        eval=dict(weights="target", knn_every_epochs=5),
    )
