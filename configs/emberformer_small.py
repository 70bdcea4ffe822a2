"""EmberFormer, the small published size: 400 x 400 pixels, 16-pixel patches, SegFormer B0, batch 8.

    jepa-jax train --config=emberformer_small --workdir=runs/emberformer_small --config.data.dir=DIR

DIR holds .npz sequences (docs/guides/wildfire.md); the data of the authors are not public, so that their number of
terrain channels is a guess (3). As published: sizes, batch, both rates, decay, epochs, patience and least improvement,
automatic weights of the cross-entropy, mixed precision on GPUs. Not as published: the F1 that stops the run is that of
the best threshold on validation fires, not of .5; AdamW instead of Adam; warm-up, cosine and clipping; and what the
authors' code leaves out (the SegFormer encoder, the training of the refinement) is there. The authors saw a precision
of 24 to 26 % at a recall of 98 % (an F1 of about .41) and expected .75 to .80; nothing was measured here.
Public weights of the decoder: --config.model.decoder_weights=PATH of nvidia/segformer-b0-finetuned-ade-512-512.
"""

import ml_collections

from jepa_jax.config import default_config
from jepa_jax.config.recipe import by_machine

WIDE = {"data.batch_size": 32, "model.width": 128, "model.depth": 6, "model.heads": 8, "model.mlp_width": 512}
# The sizes of the authors, with the GB that they guess on an RTX 3090; of the last one they then saw 23.8.
LADDER: tuple = (
    ("small", {}, 2.7),
    ("medium", {"data.batch_size": 16, "model.width": 96}, 6),
    ("batch 32", {"data.batch_size": 32}, 6),
    ("wide and deep", WIDE, 10),
    ("large", {**WIDE, "model.decoder_size": "b2"}, (12, 14)),
    ("XLarge", {**WIDE, "model.decoder_size": "b2", "data.batch_size": 48}, (18, 23.8)),
)


def get_config() -> ml_collections.ConfigDict:
    config = default_config("emberformer", "emberformer")
    config.data.source = "fire_sequences"
    config.data.dir = "data/fires"
    config.data.max_frames = 20
    config.data.image_size = 400
    config.data.batch_size = 8
    config.data.num_workers = 4
    config.data.frame_buckets = (6, 11)
    config.data.validation = 0.1111
    config.optim.lr = 1e-3
    config.optim.reference_batch = config.data.batch_size
    config.optim.epochs = 20.0
    config.optim.weight_decay = 1e-4
    config.optim.clip_norm = 1.0
    config.train.keep_best = "validation_f1"
    config.train.patience = 3
    config.train.min_delta = 0.002
    config.train.precision = by_machine("bfloat16", "float32")
    config.eval.batch_size = 8
    config.log.pictures_every_epochs = 1
    return config
