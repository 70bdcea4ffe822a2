"""LeJEPA on Imagenette: ViT-S/16, 2 large and 6 small crops, 200 epochs, batch 128, bfloat16, for one GPU.

    jepa-jax train --config=lejepa_imagenette --workdir=runs/lejepa_imagenette --config.data.dir=DIR

DIR holds the folders train and val of Imagenette. Encoder, crops, augmentation, AdamW, rate, decay, batch, warm-up and
length are those of stable-pretraining's benchmark, which publishes 87.1 % for its best online linear probe and 85.4 %
for k-NN. Unlike it: the loss is LeJEPA's, 0.95 invariance + 0.05 SIGReg, where SIGReg is the mean over views (there:
invariance + 0.02 SIGReg, with the views of all images as one sample); no drop-path, no linear layer before the
projector; crops are taken from a centre crop of 256 pixels (with data.crops=loader from the whole photograph); bfloat16
instead of float16. Not reproduced here.
"""


def get_config() -> dict:
    return dict(
        base="lejepa_in1k",
        method=dict(small=dict(crop=dict(size=96))),
        model=dict(name="vit_small", patch_size=16),
        data=dict(source="folder", dir="data/imagenette", batch_size=128, num_workers=8),
        optim=dict(lr=4e-4, epochs=200.0, warmup_epochs=2.0, warmup_lr=4e-6, end_lr=4e-6),
    )
