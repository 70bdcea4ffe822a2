"""Image JEPA on CIFAR-10 with a sliced Gaussian regulariser (BCS): ResNet-18, 300 epochs, batch 256, bfloat16.

    jepa-jax train --config=image_jepa_sigreg --workdir=runs/image_jepa_sigreg

Cost: one GPU, as image_jepa with a smaller projector. EB-JEPA publishes 91.02 % for this recipe, on its own hardware;
not reproduced here. LeJEPA's form of the loss: --config.method.loss=sigreg.
"""


def get_config() -> dict:
    return dict(
        base="image_jepa",
        method=dict(loss="bcs", projector=(2048, 2048, 128)),
    )
