"""Counts the floating-point operations of a program from its jaxpr: matrix products and convolutions, nothing else.

A loop body counts as often as it runs. Of a branch, the most expensive one counts. Convolutions count the products that
exist: padding and the holes of dilated inputs are left out.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def count_flops(function: Callable, *args: Any) -> int:
    """Of calling `function` on arrays or ShapeDtypeStructs; one multiply-add is two operations."""
    return jaxpr_flops(jax.make_jaxpr(function)(*args).jaxpr)


def jaxpr_flops(jaxpr: core.Jaxpr) -> int:
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot_flops(equation)
    if name == "conv_general_dilated":
        return _conv_flops(equation)
    inner = [jaxpr_flops(jaxpr) for jaxpr in _inner_jaxprs(params)]
    if name == "cond":
        return max(inner, default=0)
    if name == "scan":
        return params["length"] * sum(inner)
    return sum(inner)  # a call; a while loop, whose length is unknown, counts once


def _inner_jaxprs(params: dict[str, Any]) -> list[core.Jaxpr]:
    values = itertools.chain.from_iterable(v if isinstance(v, tuple | list) else [v] for v in params.values())
    return [
        v.jaxpr if isinstance(v, core.ClosedJaxpr) else v
        for v in values
        if isinstance(v, core.ClosedJaxpr | core.Jaxpr)
    ]


def _dot_flops(equation: Any) -> int:
    (contracting, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracting)


def _conv_flops(equation: Any) -> int:
    params = equation.params
    numbers = params["dimension_numbers"]
    left, right = (v.aval.shape for v in equation.invars)
    out = equation.outvars[0].aval.shape
    products = 1  # pairs of output position and kernel tap that meet a real input, over all spatial axes
    spatial = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    for axis, (in_left, in_right, in_out) in enumerate(spatial):
        products *= _meeting_pairs(
            size=left[in_left], taps=right[in_right], outputs=out[in_out], stride=params["window_strides"][axis],
            before=params["padding"][axis][0], hole=params["lhs_dilation"][axis], spread=params["rhs_dilation"][axis],
        )  # fmt: skip
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    return 2 * batch * features * right[numbers.rhs_spec[1]] * products // params["batch_group_count"]


def _meeting_pairs(*, size: int, taps: int, outputs: int, stride: int, before: int, hole: int, spread: int) -> int:
    pairs = 0
    for tap in range(taps):
        for output in range(outputs):
            at = output * stride + tap * spread - before
            pairs += at >= 0 and at % hole == 0 and at // hole < size
    return pairs
