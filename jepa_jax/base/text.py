"""Numbers as people write them, and lists of numbers as they type them."""

import math
from typing import Any

from jepa_jax.base.errors import UserError

GIB = 2**30
LARGEST = 1e100  # larger values count as infinite, so that the arithmetic of chart axes cannot overflow


def number(value: Any) -> float | None:
    """A finite float, or None for whatever is not one (None, "nan", text, a list, infinity)."""
    if isinstance(value, bool):
        return None
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if math.isfinite(value) and abs(value) < LARGEST else None


def short(value: Any, digits: int = 4) -> str:
    """A number as people write it: 12,345 · 0.0312 · 3e-05."""
    value = number(value)
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    if abs(value) >= 1000 and abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def percent(value: Any) -> str:
    """Returns a percentage with one decimal: 71.3 %."""
    value = number(value)
    return "–" if value is None else f"{value:.1f} %"


def duration(seconds: Any) -> str:
    """12.3 s · 4 min 05 s · 2 h 07 min."""
    seconds = number(seconds)
    if seconds is None or seconds < 0:
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def gib(num_bytes: Any) -> str:
    """Returns a size in GiB: 1,023.50 GiB."""
    num_bytes = number(num_bytes)
    return "–" if num_bytes is None else f"{num_bytes / GIB:,.2f} GiB"


def data_size(num_bytes: Any) -> str:
    """Returns a size in GiB, or in MiB if it is smaller than one GiB: 1.50 GiB · 12 MiB."""
    num_bytes = number(num_bytes)
    return gib(num_bytes) if num_bytes is None or num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def parse_numbers(flag: str, text: str, kind: type = float, smallest: float = 0.0) -> list:
    """'.1,.3' -> [0.1, 0.3], in the given order, without repeats."""
    numbers = []
    for part in text.split(","):
        try:
            value = kind(part)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= smallest and (kind is int or value > smallest)):
            what = f"an integer >= {smallest:g}" if kind is int else f"a number > {smallest:g}"
            raise UserError(f"--{flag} = {text}: {part!r} is not {what}; give numbers separated by commas")
        if value not in numbers:
            numbers.append(value)
    return numbers
