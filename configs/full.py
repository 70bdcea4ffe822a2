"""Image JEPA on CIFAR-10, the long run: ResNet-18, 800 epochs, batch 512, bfloat16.

    jepa-jax train --config=full --workdir=runs/full

Batch, rate and number of epochs are those of the long run of rapid's authors; loss weights, projector and the rest are
rapid's, with its weak covariance penalty. They report above 80 % after about 3 hours on an RTX 4090, for weights that
they do not state. Never trained here: no accuracy is claimed for this config.
"""

import ml_collections

from jepa_jax.configs import rapid


def get_config() -> ml_collections.ConfigDict:
    config = rapid.get_config()
    config.data.batch_size = 512
    config.optim.lr = 0.3
    config.optim.reference_batch = config.data.batch_size
    config.optim.epochs = 800.0
    config.optim.warmup_epochs = 10.0
    config.eval.knn_every_epochs = 20
    return config
