"""Every method: loss and gradients on eight devices, with the batch or the parameters split, are those of one."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jepa_jax.config.groups import Config
from jepa_jax.program import build, objective, step
from jepa_jax.program.config import changed_config
from jepa_jax.runtime.mesh import batch_sharding, replicated
from tests.stepping import BATCH, STILL, mesh_of
from tests.tiny import DINOV2, rival_config, tiny_config, tiny_masked_config

SMALL_CROPS = {"method.view_groups": ("small",), "method.small.count": 3, "method.small.crop.size": 8}
FAST = ("dino", "dinov2")
LARGEST_ERROR = 3e-5  # relative; 1.4e-5 with jax 0.12
# Where a loss does not depend on a parameter, like on a bias before batch norm, its gradient is nothing but rounding.
NOTHING = 1e-6  # of the length of all gradients together


def configs() -> dict[str, Config]:
    losses = {loss: tiny_config(method__loss=loss, method__views=2) for loss in ("vicreg", "sigreg", "infonce", "tcr")}
    crops = {"small crops": changed_config(losses["sigreg"], SMALL_CROPS | {"method.per_view_statistics": False})}
    masked = {method: tiny_masked_config(method) for method in ("ijepa", "hjepa", "mae")}
    rivals = {method: rival_config(method) for method in ("byol", "simclr", "simsiam", "barlow_twins", "dino")}
    rivals["dinov2"] = tiny_config(**DINOV2)
    # One of them augments its views; in the others that would only take time to compile.
    still = {name: changed_config(config, STILL) for name, config in (losses | masked | rivals).items()}
    return still | crops


def loss_and_gradients(
    config: Config, batch: Any, classes: int, state: Any, data: int, fsdp: int
) -> tuple[Any, Any, Any]:
    """Returns the state, which is created where `state` is None, and the loss and gradients of one batch."""
    mesh = mesh_of(data, fsdp)
    program = build.build_program(config, num_train=96, num_classes=classes, sample=batch, mesh=mesh)
    state = program.factory.create(0, batch) if state is None else jax.device_put(state, program.factory.shardings)
    if fsdp > 1:
        assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.params))

    def gradients(state: Any, batch: Any) -> Any:
        loss = objective.Objective(program.method, program.factory).loss
        values, (_, metrics) = jax.grad(loss, has_aux=True)(
            state.params, objective.statistics_of(state), state, batch, jax.random.key(1)
        )
        return metrics["loss"], values

    shardings = (program.factory.shardings, batch_sharding(mesh))
    laid_out = (replicated(mesh), program.factory.shardings.params)
    return state, *jax.device_get(jax.jit(gradients, in_shardings=shardings, out_shardings=laid_out)(state, batch))


def cases() -> list[Any]:
    """Returns every config on two meshes; one of each kind of method, on the mesh that splits all, is fast."""
    return [
        pytest.param(name, *mesh, id=f"{name}-{mesh[0]}x{mesh[1]}", marks=() if fast else pytest.mark.slow)
        for name in configs()
        for mesh in ((2, 4), (8, 1))
        for fast in [name in FAST and mesh == (2, 4)]
    ]


@functools.cache
def on_one_device(name: str) -> tuple[Any, Any, Any]:
    return loss_and_gradients(configs()[name], BATCH, 10, None, 1, 1)


@pytest.mark.parametrize(("name", "data", "fsdp"), cases())
def test_eight_devices_give_the_loss_and_gradients_of_one(name, data, fsdp, monkeypatch):
    monkeypatch.setattr(step, "FSDP_SMALLEST_SIZE", 64)  # tiny models have no large arrays
    compare_devices(on_one_device(name), configs()[name], BATCH, 10, data, fsdp)


def check_devices(config: Config, batch: Any, classes: int, data: int, fsdp: int) -> None:
    """Asserts that loss and gradients of a batch on data x fsdp devices are those of one device."""
    alone = loss_and_gradients(config, batch, classes, None, 1, 1)
    compare_devices(alone, config, batch, classes, data, fsdp)


def compare_devices(
    alone: tuple[Any, Any, Any], config: Config, batch: Any, classes: int, data: int, fsdp: int
) -> None:
    state, loss, gradients = alone
    everything = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(gradients)))

    def compare(path: Any, one: np.ndarray, eight: np.ndarray) -> None:
        length, error = (np.linalg.norm(x.astype(np.float64)) for x in (one, one - eight))
        assert error <= max(LARGEST_ERROR * length, NOTHING * everything), (jax.tree_util.keystr(path), error, length)

    _, other_loss, other = loss_and_gradients(config, batch, classes, state, data, fsdp)
    assert other_loss == pytest.approx(loss, rel=LARGEST_ERROR, abs=1e-6)  # cosines may add up to nearly nothing
    jax.tree_util.tree_map_with_path(compare, gradients, other)
