"""What the backward pass of blocks computes again instead of keeping it (`train.remat`)."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jepa_jax.base.scope import Scope

NONE, LIGHT, FULL = "none", "light", "full"
_PRODUCT, _STATISTIC = "product", "statistic"
# The scope in which nothing is recomputed, to count the operations of a step that are of use.
without_remat = Scope("without_remat")
# `with noted_remat([]) as noted` lists what functions recompute that are traced inside, to tell who ignores `remat`.
noted_remat = Scope("noted_remat")
Value = TypeVar("Value", bound=jax.Array)


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
    if noted_remat.value is not None:
        noted_remat.value.append(remat)
    if remat == FULL:
        return nnx.remat(run)
    kept = (_STATISTIC,) if cheap_products else (_PRODUCT, _STATISTIC)
    return nnx.remat(run, policy=jax.checkpoint_policies.save_only_these_names(*kept))
