"""Plans of functions that know nothing of this package."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jepa_jax.base.errors import UserError
from jepa_jax.compiled.buffers import ARGUMENTS, KEPT
from jepa_jax.planning import plan

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the wheels of the compiler are for Linux")
ROOT = pathlib.Path(__file__).parents[2]
WIDTH, DEPTH, BATCH = 1024, 4, 8192


def loss(params, x, y):
    for weights in params:
        x = jnp.tanh(x @ weights)
    return jnp.mean((x - y) ** 2)


def sgd_step(params, x, y):
    value, gradients = jax.value_and_grad(loss)(params, x, y)
    return [w - 0.1 * g for w, g in zip(params, gradients, strict=True)], value


@pytest.fixture(scope="module")
def planned():
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * DEPTH
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    return plan(jax.jit(sgd_step, donate_argnums=0), params, x, x, gpu="rtx3060", samples=BATCH)


@on_linux
def test_the_buffers_alive_at_the_peak_add_up_to_the_peak(planned):
    assert planned.peak.bytes == pytest.approx(planned.need.peak, rel=0.02)
    sizes = [buffer.bytes for buffer in planned.peak.buffers]
    assert sizes == sorted(sizes, reverse=True)


@on_linux
def test_the_peak_says_what_it_holds_and_which_line_made_it(planned):
    groups = planned.peak.totals(by="group")
    assert groups[ARGUMENTS] == 4 * (DEPTH * WIDTH**2 + 2 * BATCH * WIDTH)
    activation = 4 * BATCH * WIDTH
    assert activation <= groups[KEPT] <= (DEPTH + 1) * activation
    assert any(source.startswith("test_any_step.py:") for source in planned.peak.totals(by="source"))


@on_linux
def test_products_are_counted_and_timed(planned):
    flops = sum(kernel.flops * kernel.runs for kernel in planned.kernels)
    assert flops == (3 * DEPTH - 1) * 2 * BATCH * WIDTH**2  # no gradient of the input
    assert planned.prediction.seconds > planned.prediction.bound_seconds > flops / 12.7e12 / 1.5
    assert planned.verdict == "fits" and planned.recomputed == 0


@on_linux
def test_a_plan_is_text_and_tables_of_a_notebook(planned):
    text, page = str(planned), planned._repr_html_()
    assert "NVIDIA GeForce RTX 3060: fits" in text and "test_any_step.py:" in text
    assert page.startswith("<pre>NVIDIA GeForce RTX 3060: fits") and "<lambda" not in page


def over_eight(case):
    """Returns a function and its arguments, with a batch that is split over eight devices in one of several ways."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    split, weights = P(("data", "model")), jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    if case == "arguments":
        weights = weights.update(sharding=NamedSharding(mesh, P()))
        return jax.jit(sgd_step), [weights], batch.update(sharding=NamedSharding(mesh, split))
    if case == "abstract mesh":
        alone = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
        return sgd_step, [weights], batch.update(sharding=NamedSharding(alone, P("data")))
    auto = NamedSharding(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), P("data"))
    if case == "in_shardings":
        return jax.jit(sgd_step, in_shardings=(None, auto, auto), donate_argnums=0), [weights], batch

    def constrained(params, x, y):
        return sgd_step(params, jax.lax.with_sharding_constraint(x, auto), y)

    return jax.jit(constrained), [weights], batch


@on_linux
@pytest.mark.parametrize("case", ["arguments", "abstract mesh", "in_shardings", "constraint"])
def test_shardings_are_kept(case):
    step, params, x = over_eight(case)
    planned = plan(step, params, x, x, gpu="a100-80", samples=BATCH)
    assert planned.devices == 8 and str(planned).startswith("8 x NVIDIA A100")
    assert sum(kernel.flops * kernel.runs for kernel in planned.kernels) == 2 * 2 * BATCH * WIDTH**2 / 8
    assert planned.prediction.parts["exchange"] > 0
    whole = 4 * WIDTH * (WIDTH + 2 * BATCH)
    shared = 4 * WIDTH * (WIDTH + 2 * BATCH // 8)
    assert planned.peak.totals(by="group")[ARGUMENTS] == (whole if case == "constraint" else shared)


@on_linux
def test_the_example_runs_as_a_program_of_its_own(tmp_path):
    example = ROOT / "docs/examples/plan_a_step.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("JAX_PLATFORMS", None)
    done = subprocess.run(
        [sys.executable, shutil.copy(example, tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "NVIDIA GeForce RTX 4090: fits" in done.stdout and "plan_a_step.py:" in done.stdout
    assert "8 x NVIDIA A100-SXM4-80GB: fits" in done.stdout
    assert len(example.read_text().splitlines()) <= 60


def test_mistakes_are_named():
    with pytest.raises(UserError, match="mode='eval': use train or infer"):
        plan(sgd_step, mode="eval")
    with pytest.raises(UserError, match="--gpu=rtx9999: unknown"):
        plan(sgd_step, gpu="rtx9999")
