"""EmberFormer, the small published size: 400 x 400 pixels, 16-pixel patches, SegFormer B0, batch 8.

    jepa-jax train --config=emberformer_small --workdir=runs/emberformer_small --config.data.dir=DIR

DIR holds .npz sequences (docs/guides/wildfire.md); the data of the authors are not public, so that their number of
terrain channels is a guess (3). As published: sizes, batch, both rates, decay, epochs, patience and least improvement,
automatic weights of the cross-entropy. Not as published: the F1 that stops the run is that of the best threshold on
validation fires, not of .5; AdamW instead of Adam; warm-up, cosine and clipping; and what the authors' code leaves out
(the SegFormer encoder, the training of the refinement) is there. The authors saw a precision of 24 to 26 % at a recall
of 98 % (an F1 of about .41) and expected .75 to .80; nothing was measured here.
Public weights of the decoder: --config.model.decoder_weights=PATH of nvidia/segformer-b0-finetuned-ade-512-512.
"""

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


def get_config() -> dict:
    return dict(
        method=dict(name="emberformer"),
        model=dict(name="emberformer"),
        data=dict(
            source="fire_sequences", dir="data/fires", image_size=400, max_frames=20, frame_buckets=(6, 11),
            validation=0.1111, batch_size=8, num_workers=4,
        ),
        optim=dict(lr=1e-3, weight_decay=1e-4, epochs=20.0, clip_norm=1.0),
        train=dict(keep_best="validation_f1", patience=3, min_delta=0.002),
        eval=dict(batch_size=8),
        log=dict(pictures_every_epochs=1),
    )  # fmt: skip
