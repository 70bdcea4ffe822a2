"""Compilation: operations of the program as this platform computes them, and the peak they are compared with."""

import jax
import jax.numpy as jnp

from jepa_jax.profiling.compilations import traced_flops
from jepa_jax.profiling.peak import peak_flops


def test_the_peak_is_that_of_the_devices_that_take_part():
    assert peak_flops(2.0, "float32", 3) == (6e12, "profile.peak_tflops")


def test_operations_are_those_of_the_platform():
    step = jax.jit(lambda x: jax.lax.platform_dependent(x, cpu=lambda x: x, default=lambda x: x @ x))
    assert traced_flops(step.trace(jnp.ones([4, 4]))) == 0  # the most expensive branch is for others
