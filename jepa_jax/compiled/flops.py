"""Counts the floating-point operations of a program from its jaxpr: matrix products and convolutions only.

A loop body counts as often as it runs, the body of a kernel once per cell of its grid. Of the branches of a conditional
the most expensive one counts; of `lax.platform_dependent`, the one of the requested platform, or the default instead of
a kernel, which pads its inputs and computes things again, and of what fills up channels for GPUs. Convolutions count
the products that exist: padding and the holes of dilated inputs are left out. What no result depends on is not counted.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

# One operation per number, as XLA counts: for comparisons with its analysis, never for speed.
ELEMENTWISE = frozenset((
    "add", "add_any", "sub", "mul", "div", "max", "min", "rem", "neg", "abs", "sign", "floor", "ceil", "round",
    "square", "select_n", "clamp", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not",
    "convert_element_type", "shift_left", "shift_right_logical", "shift_right_arithmetic", "integer_pow", "is_finite",
))  # fmt: skip
REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"))


@dataclasses.dataclass(frozen=True)
class Rules:
    """What counts."""

    platform: str | None = None  # "cpu", "cuda", ... for programs that differ by platform; None: the most expensive
    loops_once: bool = False  # count a loop body once, as XLA's own analysis does
    padding: bool = False  # also count products with the padding of convolutions, as published MACs do
    elementwise: bool = False  # also count additions, comparisons, conversions and reductions, as XLA does


PRODUCTS = Rules()


def count_flops(function: Callable[..., Any], *args: Any, rules: Rules = PRODUCTS) -> int:
    """Returns the operations of a call with arrays or ShapeDtypeStructs; a multiply-add is two operations."""
    return jaxpr_flops(jax.make_jaxpr(function)(*args).jaxpr, rules)


def jaxpr_flops(jaxpr: core.Jaxpr, rules: Rules = PRODUCTS, used: list[bool] | None = None) -> int:
    """Returns the operations of a jaxpr that are needed for the results in `used` (by default all)."""
    live = {v for i, v in enumerate(jaxpr.outvars) if isinstance(v, core.Var) and (used is None or used[i])}
    total = 0
    for equation in reversed(jaxpr.eqns):
        wanted = [v in live for v in equation.outvars]
        if any(wanted) or equation.effects:
            live.update(v for v in equation.invars if isinstance(v, core.Var))
            total += _equation_flops(equation, rules, wanted)
    return total


def _equation_flops(equation: Any, rules: Rules, wanted: list[bool]) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracting, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracting)
    if name == "conv_general_dilated":
        return _conv_flops(equation, rules)
    if rules.elementwise and name in ELEMENTWISE:
        return equation.outvars[0].aval.size
    if rules.elementwise and name in REDUCTIONS:
        return equation.invars[0].aval.size
    inner = []
    for jaxpr in inner_jaxprs(params):
        # The results of a loop's body also feed its next iteration; those of a call or a branch are the equation's.
        own = name not in ("scan", "while", "pallas_call") and len(jaxpr.outvars) == len(wanted)
        inner.append(jaxpr_flops(jaxpr, rules, wanted if own else None))
    if name == "cond":
        platforms = params.get("branches_platforms")
        if platforms is not None and None in platforms:
            default = inner[platforms.index(None)]
            kernels = map(has_kernel, inner_jaxprs(params))
            inner = [default if kernel else flops for kernel, flops in zip(kernels, inner, strict=True)]
        if platforms is None or rules.platform is None:
            return max(inner, default=0)
        named = [i for i, names in enumerate(platforms) if names is not None and rules.platform in names]
        flops = inner[named[0] if named else platforms.index(None)]
        return min(flops, inner[platforms.index(None)]) if rules.platform == "cuda" and None in platforms else flops
    if name == "scan" and not rules.loops_once:
        return params["length"] * sum(inner)
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid) * sum(inner)
    return sum(inner)  # a call; a while loop, whose length is unknown, counts once


def has_kernel(jaxpr: core.Jaxpr) -> bool:
    """Returns whether a jaxpr calls a kernel, directly or inside of something else."""
    return any(
        equation.primitive.name == "pallas_call" or any(map(has_kernel, inner_jaxprs(equation.params)))
        for equation in jaxpr.eqns
    )


def inner_jaxprs(params: dict[str, Any]) -> list[core.Jaxpr]:
    """Returns the jaxprs among the parameters of an equation: bodies of calls and loops, branches."""
    values = itertools.chain.from_iterable(v if isinstance(v, tuple | list) else [v] for v in params.values())
    return [
        v.jaxpr if isinstance(v, core.ClosedJaxpr) else v
        for v in values
        if isinstance(v, core.ClosedJaxpr | core.Jaxpr)
    ]


def _conv_flops(equation: Any, rules: Rules) -> int:
    params = equation.params
    numbers = params["dimension_numbers"]
    left, right = (v.aval.shape for v in equation.invars)
    out = equation.outvars[0].aval.shape
    products = 1  # pairs of output position and kernel tap that meet a real input, over all spatial axes
    spatial = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    for axis, (in_left, in_right, in_out) in enumerate(spatial):
        if rules.padding:
            products *= right[in_right] * out[in_out]
            continue
        stride, before = params["window_strides"][axis], params["padding"][axis][0]
        hole, spread = params["lhs_dilation"][axis], params["rhs_dilation"][axis]
        taps, outputs = range(right[in_right]), range(out[in_out])
        places = (output * stride + tap * spread - before for tap in taps for output in outputs)
        products *= sum(at >= 0 and at % hole == 0 and at // hole < left[in_left] for at in places)
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    # The kernel of a grouped convolution has the inputs of one group, which divides the count by the groups.
    return 2 * batch * features * right[numbers.rhs_spec[1]] * products
