"""EmberFormer, the large published size: wider and deeper over time, SegFormer B2, batch 32.

    jepa-jax train --config=emberformer --workdir=runs/emberformer --config.data.dir=DIR

Everything else as in emberformer_small, which says what is as published. Public weights of the decoder:
--config.model.decoder_weights=PATH of nvidia/segformer-b2-finetuned-ade-512-512.
"""

import ml_collections

from jepa_jax.configs import emberformer_small


def get_config() -> ml_collections.ConfigDict:
    config = emberformer_small.get_config()
    config.model.width = 128
    config.model.depth = 6
    config.model.heads = 8
    config.model.mlp_width = 512
    config.model.decoder_size = "b2"
    config.data.batch_size = 32
    config.optim.reference_batch = config.data.batch_size
    config.eval.batch_size = 32
    return config
