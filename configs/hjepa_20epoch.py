"""Hierarchical JEPA, ViT-Tiny/16 on CIFAR-10 at 224 pixels, 2 levels, a deeper predictor, 20 epochs.

    jepa-jax train --config=hjepa_20epoch --workdir=runs/hjepa_20epoch --config.data.dir=DIR

7,416,576 trainable parameters of 12,940,992 (jepa-jax describe). The published run aimed at 70 to 78 % linear probe and
did not reach it. Sizes, batch and epochs are its own. The rest is that of hjepa_quick_val; the published run has a rate
of 1.5e-4, a warm-up of 4 epochs and colour jitter.
"""

import ml_collections

from jepa_jax.configs import hjepa_quick_val


def get_config() -> ml_collections.ConfigDict:
    config = hjepa_quick_val.get_config()
    config.method.predictor_depth = 4
    config.method.predictor_heads = 6
    config.optim.epochs = 20.0
    return config
