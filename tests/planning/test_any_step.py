"""Plans of functions that know nothing of this package."""

import sys

import jax
import jax.numpy as jnp
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.compiled.buffers import ARGUMENTS, KEPT
from jepa_jax.planning import plan

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the wheels of the compiler are for Linux")
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


def test_mistakes_are_named():
    with pytest.raises(UserError, match="mode='eval': use train or infer"):
        plan(sgd_step, mode="eval")
    with pytest.raises(UserError, match="--gpu=rtx9999: unknown"):
        plan(sgd_step, gpu="rtx9999")
