"""Programs of configs with random images to run them on, for the scripts that time single steps."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jepa_jax.config.groups import Config
    from jepa_jax.program.build import Program


def build_on_random_images(config: "Config", *, num_train: int) -> tuple["Program", dict[str, np.ndarray]]:
    """Returns the program of a config for one device, and a batch of random labelled images."""
    from jepa_jax.program.build import build_program
    from jepa_jax.runtime.mesh import make_mesh

    size, count = config.data.image_size, config.data.batch_size
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, size, size, 3), np.uint8)
    batch: dict[str, Any] = {"image": images, "label": rng.integers(0, 10, count).astype(np.int32)}
    return build_program(config, num_train=num_train, num_classes=10, sample=batch, mesh=make_mesh(1, 1)), batch
