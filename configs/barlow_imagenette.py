"""Barlow Twins on Imagenette as lightly's benchmark runs it: ResNet-18 at 128 pixels, 800 epochs.

    jepa-jax train --config=barlow_imagenette --workdir=runs/barlow_imagenette --config.data.dir=DIR

Projector and lambda (.005) are those of lightly's Imagenette benchmark, which publishes 78.9 % for k-NN after 800
epochs; views, optimizer and length are those of simclr_imagenette, as there, and so is what differs, but for the
projector. Not reproduced here. One GPU.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import simclr_imagenette


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(simclr_imagenette.get_config(), method__name="barlow_twins")
    config.method.projector = (2048, 2048, 2048)
    config.method.redundancy_weight = 0.005
    return config
