"""Numbers as people write them, and lists of numbers as they type them."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jepa_jax.base.errors import UserError

GIB = 2**30
LARGEST = 1e100  # larger values count as infinite, so that the arithmetic of chart axes cannot overflow


def number(value: Any) -> float | None:
    """Returns a finite float, or None for whatever is not one (None, "nan", text, a list, infinity)."""
    if isinstance(value, bool):
        return None
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if math.isfinite(value) and abs(value) < LARGEST else None


def _of_number(write: Callable[..., str]) -> Callable[..., str]:
    """Lets a function of a number take anything; whatever is no number becomes a dash."""

    @functools.wraps(write)
    def text(value: Any, *arguments: Any, **options: Any) -> str:
        value = number(value)
        return "–" if value is None else write(value, *arguments, **options)

    return text


@_of_number
def short(value: float, digits: int = 4) -> str:
    """Returns a number as people write it: 12,345 · 0.0312 · 3e-05."""
    if abs(value) < 1e9 and (value == int(value) or abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


@_of_number
def percent(value: float) -> str:
    """Returns a percentage with one decimal: 71.3 %."""
    return f"{value:.1f} %"


@_of_number
def duration(seconds: float) -> str:
    """Returns a length of time: 12.3 s · 4 min 05 s · 2 h 07 min."""
    whole = round(seconds)
    if seconds < 0:
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"
    )


@_of_number
def gib(num_bytes: float) -> str:
    """Returns a size in GiB: 1,023.50 GiB."""
    return f"{num_bytes / GIB:,.2f} GiB"


@_of_number
def data_size(num_bytes: float) -> str:
    """Returns a size in GiB, or in MiB if it is smaller than one GiB: 1.50 GiB · 12 MiB."""
    return gib(num_bytes) if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def shortened(text: str, length: int = 300) -> str:
    """Returns the first line of a message, cut to `length` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= length else line[: length - 3] + "..."


def first_of(names: Sequence[str], most: int) -> str:
    """Returns the first names of a list, and how many more there are: a, b and 3 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def parse_numbers(flag: str, text: str, kind: type = float, smallest: float = 0.0) -> list:
    """Parses ".1,.3" to [0.1, 0.3], in the given order, without repeats."""
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
