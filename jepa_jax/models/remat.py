"""What the backward pass of blocks computes again instead of keeping it (`train.remat`)."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jepa_jax.base.scope import Scope

NONE, LIGHT, FULL = "none", "light", "full"
_PRODUCT, _STATISTIC = "product", "statistic"
# The scope in which nothing is recomputed, to count the operations of a step that are of use.
without_remat = Scope("without_remat")
_noted: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("noted remat", default=None)
Value = TypeVar("Value", bound=jax.Array)


@contextlib.contextmanager
def noted_remat() -> Iterator[list[str]]:
    """Notes in a list what the functions recompute that are traced inside the block, to tell who ignores `remat`."""
    noted: list[str] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def product(x: Value) -> Value:
    """Marks the result of a convolution, a matrix product or attention, which `light` keeps."""
    return checkpoint_name(x, _PRODUCT)


def statistic(x: Value) -> Value:
    """Marks a small result of a reduction over large arrays, which `light` keeps."""
    return checkpoint_name(x, _STATISTIC)


def rematerialized(run: Callable[..., Any], remat: str, *, cheap_products: bool = False) -> Callable[..., Any]:
    """Returns a function of modules and arrays whose backward pass recomputes what `remat` says.

    Args:
        run: the function.
        remat: none recomputes nothing, light all but products and statistics (norms, activations, dropout), full
            everything.
        cheap_products: whether light recomputes products too, because they are cheap for their size.
    """
    if remat == NONE or without_remat:
        return run
    if (noted := _noted.get()) is not None:
        noted.append(remat)
    if remat == FULL:
        return nnx.remat(run)
    kept = (_STATISTIC,) if cheap_products else (_PRODUCT, _STATISTIC)
    return nnx.remat(run, policy=jax.checkpoint_policies.save_only_these_names(*kept))
