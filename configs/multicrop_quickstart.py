"""Multi-crop on the embedded shapes, minutes on a CPU: the quickstart with 2 large and 6 small views of each image.

    jepa-jax train --config=multicrop_quickstart --workdir=runs/multicrop_quickstart

Small views have a quarter of the pixels and are compared with the mean of the large ones. To compare with two views:
the same command with --config=quickstart --config.method.views=2, with as many epochs as take the same CPU time.
Two views were ahead when both had about 2.5 CPU-minutes (docs/results/methods.md).
"""


def get_config() -> dict:
    return dict(
        base="quickstart",
        method=dict(
            views=2,
            view_groups=("small",),
            small=dict(count=6, crop=dict(size=8, scale=(0.05, 0.3))),
        ),
    )
