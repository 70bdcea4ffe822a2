"""EmberFormer on simulated fires that a CPU can train within 24 CPU-minutes.

jepa-jax train --config=emberformer_cpu --workdir=runs/emberformer_cpu
"""


def get_config() -> dict:
    return dict(
        method=dict(name="emberformer", spatial_lr=3e-3, loss=dict(bce=1.0, positive_weight=1.0)),
        model=dict(
            name="emberformer",
            patch_size=2,
            width=32,
            depth=2,
            heads=4,
            mlp_width=64,
            dropout=0.0,
            fire_input="pixels",
            wind_input="vector",
            decoder="unet",
            decoder_widths=(32, 64),
            refine_width=32,
            refine_inputs=True,
        ),
        data=dict(
            source="wildfire",
            image_size=32,
            num_train=16384,
            num_test=1024,
            max_frames=6,
            frame_buckets=(4,),
            validation=0.0625,
            batch_size=32,
        ),
        optim=dict(lr=3e-3, weight_decay=1e-4, epochs=3.0, warmup_epochs=0.1, clip_norm=1.0),
        train=dict(keep_best="validation_new_average_precision"),
        eval=dict(batch_size=32),
        log=dict(pictures_every_epochs=1),
    )
