"""BYOL on the embedded shapes, minutes on a CPU.

    jepa-jax train --config=byol_quickstart --workdir=runs/byol_quickstart

Cost: 2.5 CPU-minutes. Linear probe 44.4 %, 43.9 % on held-out training images, untrained 20.2 %;
no collapse warning (one seed, two busy cores).
"""


def get_config() -> dict:
    return dict(
        base="quickstart",
        method=dict(name="byol", projector=(256, 64), predictor=256, ema_start=0.97),
        optim=dict(epochs=10.0),
        eval=dict(every_epochs=5, knn_every_epochs=0),
    )
