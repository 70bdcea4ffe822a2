"""VICReg on Imagenette as lightly's benchmark runs it: ResNet-18 at 128 pixels, 800 epochs.

    jepa-jax train --config=vicreg_imagenette --workdir=runs/vicreg_imagenette --config.data.dir=DIR

Projector, weights 25/25/1 (12.5 here: their variance term is halved), LARS without clip and on every parameter, 40
epochs of warm-up from 0 are those of lightly's Imagenette benchmark, which publishes 78.3 % for k-NN after 800 epochs;
views and length are those of simclr_imagenette, as there, and so is what differs, but for the projector. Not reproduced
here. One GPU.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import simclr_imagenette


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(
        simclr_imagenette.get_config(), method__name="image_jepa", method__loss="vicreg", optim__name="larc"
    )
    config.method.projector = (2048, 2048, 2048)
    config.method.invariance_weight = 25.0
    config.method.std_weight = 12.5
    config.method.cov_weight = 1.0
    config.method.covariance_normalisation = "dimensions"
    config.optim.larc_clip = False
    config.optim.larc_trust = 0.001
    config.optim.lr = 0.3
    config.optim.weight_decay = 1e-4
    config.optim.warmup_epochs = 40.0
    config.optim.warmup_lr = 0.0
    return config
