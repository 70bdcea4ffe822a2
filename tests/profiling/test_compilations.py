"""Compilation: operations of the program as this platform computes them, and the peak they are compared with."""

import jax
import jax.numpy as jnp

from jepa_jax.profiling.compilations import CompiledStep, traced_flops
from jepa_jax.profiling.speed import REACHED, loader_balance, peak_flops


def test_the_peak_is_that_of_the_devices_that_take_part():
    assert peak_flops(2.0, "float32", 3) == (6e12, "profile.peak_tflops")


def test_operations_are_those_of_the_platform():
    step = jax.jit(lambda x: jax.lax.platform_dependent(x, cpu=lambda x: x, default=lambda x: x @ x))
    assert traced_flops(step.trace(jnp.ones([4, 4]))) == 0  # the most expensive branch is for others


def test_a_step_of_several_shapes_has_the_operations_of_those_that_ran():
    step = CompiledStep(jax.jit(lambda state, batch: (state, {"loss": (batch["x"] @ batch["x"].T).sum()})))
    small, large = {"x": jnp.ones([2, 4])}, {"x": jnp.ones([8, 4])}
    assert step.flops is None and not step.is_ready_for(small)
    for batch, flops in ((small, 2 * 2 * 2 * 4), (large, 2 * 8 * 8 * 4)):
        step.compile(0.0, batch)
        assert step.flops == flops  # of the newest before any step
    for batch in (large, small, small, small):
        step(0.0, batch)
    assert (step.count, step.calls, step.flops) == (2, 4, (512 + 3 * 32) / 4)
    assert step.were_alike(3) and not step.were_alike(4)
    assert "f32[2,4]" in step.text() and "f32[8,4]" not in step.text()
    step(0.0, large)
    assert "f32[8,4]" in step.text()


def test_the_order_of_the_arrays_of_a_batch_does_not_matter():
    step = CompiledStep(jax.jit(lambda state, batch: (state, {"loss": batch["x"].sum() - batch["a"].sum()})))
    batch = {"x": jnp.ones([2]), "a": jnp.ones([3])}
    step.compile(0.0, batch)
    by_name = dict(sorted(batch.items()))
    assert list(by_name) != list(batch) and step.is_ready_for(by_name)
    assert step(0.0, by_name)[1]["loss"] == -1


def test_what_a_loader_gives_is_compared_with_what_the_step_wants():
    wants = 2 * 64 * REACHED * 1e12 / 1e9  # of elements per second, with steps of 1e9 operations
    text, too_slow = loader_balance(128, 0.5, 4, 1e9, 1e12)
    assert text.startswith("loader: 4 workers give about 1,024 elements/s") and f"{wants:,.0f}" in text and too_slow
    assert not loader_balance(128, 128 / wants / 1.1, 0, 1e9, 1e12)[1]
    assert loader_balance(128, 0.5, 4, 1e9, None) == ("", False)
