"""Image JEPA on CIFAR-10 with a sliced Gaussian regulariser (BCS): ResNet-18, 300 epochs, batch 256, bfloat16.

    jepa-jax train --config=image_jepa_sigreg --workdir=runs/image_jepa_sigreg

Cost: one GPU, as image_jepa with a smaller projector. Loss, its weight 10 and the projector 2048-128 are those with
which EB-JEPA publishes 91.02 %, the best of a sweep by its online probe. Not reproduced here; what differs is listed in
image_jepa. LeJEPA's form of the loss: --config.method.loss=sigreg.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import image_jepa


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(image_jepa.get_config(), method__loss="bcs")
    config.method.projector = (2048, 2048, 128)
    return config
