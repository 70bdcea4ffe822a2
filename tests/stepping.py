"""Programs and steps of tiny configs, for tests of methods and of the step."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jepa_jax.config.groups import Config
from jepa_jax.program import build
from jepa_jax.program.config import changed_config
from jepa_jax.program.step import TrainState
from jepa_jax.runtime.mesh import make_mesh

IMAGES = np.random.default_rng(0).integers(0, 256, (16, 16, 16, 3), np.uint8)
BATCH = {"image": IMAGES, "label": np.arange(16, dtype=np.int32) % 10}
STILL = {f"data.augment.{name}.probability": 0.0 for name in ("crop", "flip", "jitter", "grayscale", "solarize")}


def mesh_of(data: int, fsdp: int = 1) -> Mesh:
    return make_mesh(data, fsdp, jax.devices()[: data * fsdp])


def build_program(config: Config, mesh: Mesh | None = None, batch: Any = BATCH) -> build.Program:
    num_classes = 10 if "label" in batch else 0
    return build.build_program(config, num_train=96, num_classes=num_classes, sample=batch, mesh=mesh or mesh_of(1))


def model_of(program: build.Program, seed: int = 0) -> Any:
    state = program.factory.create(seed, BATCH)
    return program.factory.merge(state.params["model"], state.stats)


def take_steps(config: Config, mesh: Mesh, steps: int = 2) -> tuple[TrainState, dict]:
    """Returns state and metrics after some steps of SGD, which does not hide a difference of gradients."""
    config = changed_config(config, {"optim.name": "sgd", "optim.warmup_lr": 0.05, "optim.lr": 0.05})
    program = build_program(config, mesh)
    state = program.factory.create(0, BATCH)
    for _ in range(steps):
        state, metrics = program.train_step(state, BATCH)
    return jax.device_get(state), jax.device_get(metrics)


def assert_close(a: Any, b: Any, rtol: float = 2e-3) -> None:
    def close(x: Any, y: Any) -> None:
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * 0.1)

    jax.tree.map(close, a, b)
