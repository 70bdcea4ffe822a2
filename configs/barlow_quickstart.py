"""Barlow Twins on the embedded shapes, minutes on a CPU.

    jepa-jax train --config=barlow_quickstart --workdir=runs/barlow_quickstart

Differs from byol_quickstart in the method alone. Cost: 2.3 CPU-minutes. Linear probe 57.9 %, 59.5 % on held-out
training images, untrained 20.2 %; no collapse warning (one seed, two busy cores).
"""


def get_config() -> dict:
    return dict(base="byol_quickstart", method=dict(name="barlow_twins", projector=(256, 256), redundancy_weight=0.02))
