"""Arrays and modules for tests, made without compiling a program for each operation."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from flax import nnx

M = TypeVar("M", bound=nnx.Module)


def normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns normal deviates in float32."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def create(build: Callable[[], M]) -> M:
    """Returns the module that `build` makes, initialised by one program instead of one for each parameter."""
    return nnx.jit(build)()
