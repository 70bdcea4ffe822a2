"""Seconds of kernels: their work at the share of a GPU's rates that published measurements show.

The table `factors.json` holds, for training and for inference and for each architecture, the share of the peak rate
that products of each kind reach and the share of the bandwidth that traffic reaches, none above 0.9. The measured cards
are GeForce, which run above the clock they are advertised with and hold much in their caches: `sustained` is by how
much their rates are higher, which does not hold for other cards. `profiling/check_predictions.py` fits the table;
docs/results/predictions.md has its errors.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from jepa_jax.base.files import read_json
from jepa_jax.compiled.kernels import ELEMENTWISE, KINDS, Kernel
from jepa_jax.runtime.hardware import GEFORCE, Gpu

TABLE_FILE = pathlib.Path(__file__).with_name("factors.json")
LAUNCH_SECONDS = 3e-6  # between the starts of two short kernels
ARITHMETIC_SHARE = 0.5  # of the float32 units, that fusions reach: assumed, since none of the measurements shows it
TRAFFIC = "traffic"
ARCHITECTURES = {(8, 6): "ampere", (8, 9): "ada", (12, 0): "blackwell"}  # that many measurements exist of
# Those on which the software that stands for XLA was measured; the factors of the others follow from other rows.
MEASURED = {"train": ("ampere",), "infer": ("ada", "blackwell")}
NEAREST = {(7, 0): "a100", (7, 5): "ampere", (8, 0): "a100", (9, 0): "a100", (10, 0): "a100"}
UNMEASURED = 2.0  # times the error, where nothing was measured
HALF_TYPES = ("bf16", "f16")

Shares = Mapping[str, float]  # kind of products, or TRAFFIC: share of the peak


@dataclasses.dataclass(frozen=True)
class Factors:
    """What a kind of program reaches on a GPU, and how far predictions of unseen measurements were off.

    `median_error` and `p90_error` are of the logarithm of predicted over measured speed.
    """

    shares: Shares
    median_error: float
    p90_error: float
    measured: bool  # whether such programs were measured on this architecture


def factors_of(gpu: Gpu, mode: str = "train") -> Factors:
    """Returns the factors of a GPU for "train" or "infer"; those of the nearest architecture if it was not measured."""
    table = _table()[mode]
    own = ARCHITECTURES.get(gpu.compute_capability)
    shares, measured = table["shares"][own or NEAREST[gpu.compute_capability]], False
    if own and GEFORCE in gpu.name:
        measured = own in MEASURED[mode]
        above = _table()["sustained"][own]
        shares = {kind: share * above[TRAFFIC if kind == TRAFFIC else "products"] for kind, share in shares.items()}
    wider = 1.0 if measured else UNMEASURED
    return Factors(shares, wider * table["median_abs_error"], wider * table["p90_abs_error"], measured)


@functools.cache
def _table() -> dict[str, Any]:
    return read_json(TABLE_FILE, "install the package again")


FULL = dict.fromkeys((*KINDS, TRAFFIC), 1.0)  # what a bound takes for granted


def kernel_seconds(kernel: Kernel, gpu: Gpu, shares: Shares) -> float:
    """Returns the seconds of one kernel: the longest of its products, its other arithmetic and its traffic."""
    rate = gpu.bf16_tflops if kernel.dtype in HALF_TYPES else gpu.tf32_tflops
    products = kernel.flops / (rate * 1e12 * shares[kernel.kind]) if kernel.kind != ELEMENTWISE else 0.0
    arithmetic = kernel.operations / (gpu.operations_per_second * ARITHMETIC_SHARE)
    traffic = kernel.bytes / (gpu.bandwidth_gb_per_second * 1e9 * shares[TRAFFIC])
    return max(products, arithmetic, traffic)


def timed_kernels(kernels: Iterable[Kernel], gpu: Gpu, shares: Shares) -> list[tuple[float, Kernel]]:
    """Returns kernels with the seconds that all their runs take, the longest first."""
    timed = [(kernel.runs * kernel_seconds(kernel, gpu, shares), kernel) for kernel in kernels]
    return sorted(timed, key=lambda pair: -pair[0])


def seconds_by_kind(kernels: Iterable[Kernel], gpu: Gpu, shares: Shares) -> dict[str, float]:
    """Returns the seconds that all kernels of each kind take, one after the other."""
    totals = dict.fromkeys(KINDS, 0.0)
    for kernel in kernels:
        totals[kernel.kind] += kernel.runs * kernel_seconds(kernel, gpu, shares)
    return totals


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of a step as predicted, by what takes them, beside the bound that no program can beat."""

    samples: int
    parts: Mapping[str, float]  # seconds by kind of kernel, of launches and of exchanges between devices
    bound_seconds: float
    recomputing_seconds: float  # part of the seconds: what XLA computes again to save memory
    factors: Factors

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def images_per_sec(self) -> float:
        return self.samples / self.seconds

    @property
    def bound_images_per_sec(self) -> float:
        return self.samples / self.bound_seconds

    @property
    def predicted(self) -> tuple[float, float]:
        """Images per second, from and to: nine of ten predictions of unseen measurements were closer than this.

        The upper end is never above the bound.
        """
        factor = math.exp(self.factors.p90_error)
        return self.images_per_sec / factor, min(self.images_per_sec * factor, self.bound_images_per_sec)

    @property
    def limit(self) -> str:
        """What takes the most time."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def error_text(self) -> str:
        """How far off predictions were, in words."""
        text = f"half of the predictions of unseen measurements were within {100 * self.factors.median_error:.0f} %"
        text += f", nine of ten within {100 * self.factors.p90_error:.0f} %"
        unmeasured = "doubled: nothing of the kind was measured on this architecture"
        return text if self.factors.measured else f"{text}, {unmeasured}"


def predict(
    kernels: Iterable[Kernel],
    gpu: Gpu,
    *,
    samples: int,
    exchange_seconds: float = 0.0,
    mode: str = "train",
    shares: Shares | None = None,
) -> Prediction:
    """Returns the prediction of one call with these kernels; exchanges are taken not to overlap with them.

    `mode` is "train" or "infer"; `shares` replace those of the table.
    """
    kernels = list(kernels)
    factors = factors_of(gpu, mode) if shares is None else Factors(shares, math.nan, math.nan, False)
    parts = seconds_by_kind(kernels, gpu, factors.shares)
    parts["launches"] = LAUNCH_SECONDS * sum(kernel.runs for kernel in kernels)
    parts["exchange"] = exchange_seconds
    # Measured shares above 1 are of cards that run above their advertised clock: the bound is no lower than that.
    fastest = {name: max(share, factors.shares.get(name, share)) for name, share in FULL.items()}
    bound = sum(seconds_by_kind(kernels, gpu, fastest).values())
    again = sum(kernel.recomputed * kernel_seconds(kernel, gpu, factors.shares) for kernel in kernels)
    return Prediction(samples, {k: v for k, v in parts.items() if v}, max(bound, exchange_seconds), again, factors)
