"""BYOL on Imagenette as lightly's benchmark runs it: ResNet-18 at 128 pixels, 800 epochs.

    jepa-jax train --config=byol_imagenette --workdir=runs/byol_imagenette --config.data.dir=DIR

Heads and a constant momentum of .99 are those of lightly's Imagenette benchmark, which publishes 85.1 % for k-NN after
800 epochs; views, optimizer and length are those of simclr_imagenette, as there, and so is what differs, but for the
projector. The loss here is four times theirs: a quarter of their rate and four times their decay are the same updates.
Not reproduced here. One GPU.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import simclr_imagenette


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(simclr_imagenette.get_config(), method__name="byol")
    config.method.ema_start = 0.99
    config.method.ema_end = 0.99
    config.optim.lr = 0.06 / 4
    config.optim.weight_decay = 5e-4 * 4
    return config
