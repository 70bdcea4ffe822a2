"""EmberFormer, the large published size: wider and deeper over time, SegFormer B2, batch 32.

    jepa-jax train --config=emberformer --workdir=runs/emberformer --config.data.dir=DIR

Everything else as in emberformer_small, which says what is as published. Public weights of the decoder:
--config.model.decoder_weights=PATH of nvidia/segformer-b2-finetuned-ade-512-512.
"""


def get_config() -> dict:
    return dict(
        base="emberformer_small",
        model=dict(width=128, heads=8, depth=6, mlp_width=512, decoder_size="b2"),
        data=dict(batch_size=32),
        eval=dict(batch_size=32),
    )
