"""SimSiam on the embedded shapes, minutes on a CPU.

    jepa-jax train --config=simsiam_quickstart --workdir=runs/simsiam_quickstart

Cost: 2.4 CPU-minutes. Linear probe 61.2 %, 62.4 % on held-out training images, untrained 20.2 %;
no collapse warning (one seed, two busy cores).
"""


def get_config() -> dict:
    return dict(
        base="quickstart",
        method=dict(name="simsiam", projector=(256, 256), predictor=64),
        optim=dict(epochs=10.0),
        eval=dict(every_epochs=5, knn_every_epochs=0),
    )
