"""DINO on the embedded shapes, minutes on a CPU.

    jepa-jax train --config=dino_quickstart --workdir=runs/dino_quickstart

Cost: 2.8 CPU-minutes. Linear probe of the teacher 50.2 %, 50.7 % on held-out training images, untrained 20.2 %;
no collapse warning (one seed, two busy cores).
"""


def get_config() -> dict:
    return dict(
        base="quickstart",
        method=dict(
            name="dino",
            head=(256,),
            bottleneck=64,
            prototypes=256,
            teacher_temperature=0.04,
            frozen_last_layer=0.05,
            ema_start=0.97,
        ),
        optim=dict(epochs=10.0, clip_norm=3.0),
        eval=dict(weights="target", every_epochs=5, knn_every_epochs=0),
    )
