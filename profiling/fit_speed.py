"""Fits the shares of peak rates that programs reach to measured speeds, and tells how well unseen ones are predicted.

    python profiling/fit_speed.py card.json [card.json ...] [--write]

reads what `jepa-jax check-gpu --output=card.json` has measured and prints the shares of the training step on these
architectures; --write puts them into jepa_jax/planning/factors.json.

The logarithm of a share is the sum of an effect of the software and one of the architecture. Software is what a
measurement ran on: the mode, the engine and its memory layout. A layout changes convolutions and traffic; matrix
products share their effect between layouts, and attention is another program before version 2 of PyTorch, which fused
it. Weak priors hold what the measurements leave open: softwares are alike, and so are architectures.
"""

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from jepa_jax.base.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from jepa_jax.base.files import read_json, write_json
from jepa_jax.compiled.kernels import ATTENTION, CONVOLUTION, ELEMENTWISE, KINDS, MATMUL, Kernel
from jepa_jax.planning.factors import (
    ARCHITECTURES,
    ARITHMETIC_SHARE,
    HALF_TYPES,
    LAUNCH_SECONDS,
    TABLE_FILE,
    TRAFFIC,
    Shares,
)
from jepa_jax.runtime.hardware import Gpu, load_table

FITTED = (CONVOLUTION, MATMUL, ATTENTION, TRAFFIC)
FIRST = "ampere"  # the architecture that effects of others are relative to
TYPICAL_SHARE = 0.6
# Standard deviations of logarithms: of a measurement, of a share from the typical one, of one software from the mean of
# all, and of an architecture from the first.
NOISE, SHARE_SPREAD, SOFTWARE_SPREAD, ARCHITECTURE_SPREAD = 0.05, 0.6, 0.25, 0.2

Effect = tuple[str, ...]  # kind of share and the software or architecture that it belongs to


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A measured speed and the kernels of the same program as compiled here, at a batch `scale` times smaller."""

    gpu: Gpu
    mode: str  # "train" or "infer"
    engine: str  # "eager nchw", "eager nhwc" or "torch.compile"
    version: str  # of the engine
    group: Hashable  # measurements that are left out together
    batch_size: int
    samples_per_sec: float
    kernels: tuple[Kernel, ...]
    scale: float = 1.0

    @property
    def architecture(self) -> str:
        return ARCHITECTURES[self.gpu.compute_capability]

    @functools.cached_property
    def seconds(self) -> float:
        return self.batch_size / self.samples_per_sec

    @functools.cached_property
    def work(self) -> dict[str, np.ndarray]:
        """Rows of seconds at full rates for each kind: products, other arithmetic, traffic, and the number."""
        rates = {True: self.gpu.bf16_tflops * 1e12, False: self.gpu.tf32_tflops * 1e12}
        arithmetic = self.gpu.operations_per_second * ARITHMETIC_SHARE
        bandwidth = self.gpu.bandwidth_gb_per_second * 1e9
        rows = {
            kind: [
                (k.flops / rates[k.dtype in HALF_TYPES], k.operations / arithmetic, k.bytes / bandwidth, k.runs)
                for k in self.kernels
                if k.kind == kind
            ]
            for kind in KINDS
        }
        return {kind: np.array(values, float) for kind, values in rows.items() if values}

    def predicted_seconds(self, shares: Shares) -> float:
        """Returns the seconds of a batch if kernels reach these shares."""
        total = 0.0
        for kind, rows in self.work.items():
            products = 0.0 if kind == ELEMENTWISE else rows[:, 0] / shares[kind]
            each = np.maximum(np.maximum(products, rows[:, 1]), rows[:, 2] / shares[TRAFFIC])
            total += float(np.sum((each * self.scale + LAUNCH_SECONDS) * rows[:, 3]))
        return total

    @property
    def effects(self) -> dict[str, list[Effect]]:
        """The effects that add up to the logarithm of each share."""
        plain = self.engine.split()[0]
        fused = "" if plain != "eager" else "1" if self.version.startswith("1.") else "2"
        own: dict[str, list[Effect]] = {
            CONVOLUTION: [(CONVOLUTION, self.mode, self.engine)],
            MATMUL: [(MATMUL, self.mode, plain)],
            ATTENTION: [(ATTENTION, self.mode, plain, fused)],
            TRAFFIC: [(TRAFFIC, self.mode, self.engine)],
        }
        if self.architecture != FIRST:
            own = {kind: [*parts, (kind, self.architecture)] for kind, parts in own.items()}
        return own


@dataclasses.dataclass(frozen=True)
class Fit:
    """Effects that measurements were fitted with."""

    effects: dict[Effect, float]

    def shares(self, of: Measurement) -> dict[str, float]:
        """Returns the shares of a measurement's software and architecture."""
        return {
            kind: math.exp(sum(self.effects[effect] for effect in parts if effect in self.effects))
            for kind, parts in of.effects.items()
        }

    def error(self, of: Measurement) -> float:
        """Returns the logarithm of predicted over measured speed."""
        return math.log(of.seconds / of.predicted_seconds(self.shares(of)))


def fit(measurements: Sequence[Measurement], names: Sequence[Effect], start: Fit | None = None) -> Fit:
    """Fits the named effects to measurements, starting from another fit if there is one."""
    place = {name: i for i, name in enumerate(names)}
    kinds = np.array([FITTED.index(name[0]) for name in names])
    is_software = np.array([len(name) > 2 for name in names])
    parts = [{kind: [place[e] for e in effects] for kind, effects in m.effects.items()} for m in measurements]
    typical = math.log(TYPICAL_SHARE)

    def residuals(values: np.ndarray) -> np.ndarray:
        off = []
        for measurement, own in zip(measurements, parts, strict=True):
            shares = {kind: math.exp(sum(values[i] for i in places)) for kind, places in own.items()}
            off.append(math.log(measurement.predicted_seconds(shares) / measurement.seconds) / NOISE)
        software = values[is_software]
        means = np.array([values[is_software & (kinds == k)].mean() for k in range(len(FITTED))])
        alike = (software - means[kinds[is_software]]) / SOFTWARE_SPREAD
        held = (software - typical) / SHARE_SPREAD
        return np.concatenate([off, held, alike, values[~is_software] / ARCHITECTURE_SPREAD])

    first = np.array([start.effects[name] for name in names]) if start else np.where(is_software, typical, 0.0)
    found = least_squares(residuals, first).x
    return Fit(dict(zip(names, map(float, found), strict=True)))


def card_measurements(card: Mapping[str, Any], table: Mapping[str, Gpu]) -> list[Measurement]:
    """Returns the measurements of a file of `jepa-jax check-gpu`; refuses a card that the table does not know."""
    if card.get("gpu") not in table or not card.get("measurements"):
        device = (card.get("identity") or {}).get("device", "the file")
        raise UserError(f"{device}: no measured speeds of a GPU in the table; run check-gpu on one with --output")
    gpu = table[card["gpu"]]
    if gpu.compute_capability not in ARCHITECTURES:
        raise UserError(f"{gpu.name}: its architecture has no name in planning/factors.py: ARCHITECTURES")
    return [
        Measurement(
            gpu, "train", "xla", card["versions"]["jax"], one["config"], one["batch_size"], one["samples_per_sec"],
            tuple(Kernel(**kernel) for kernel in one["kernels"]),
        )
        for one in card["measurements"]
    ]  # fmt: skip


def refitted(measurements: Sequence[Measurement], factors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of factors.json with the shares of training that these measurements show."""
    found = fit(measurements, effect_names(measurements))
    shares = {m.architecture: {kind: round(share, 4) for kind, share in found.shares(m).items()} for m in measurements}
    versions = ", ".join(sorted({m.version for m in measurements}))
    errors = {name: round(value, 4) for name, value in error_summary(left_out_errors(measurements, found)).items()}
    train = {"software": f"XLA of jax {versions}", "shares": {**factors["train"]["shares"], **shares}, **errors}
    return {**factors, "fitted_by": "profiling/fit_speed.py", "train": train}


def main(argv: Sequence[str]) -> int:
    """Fits the cards of a command line; returns the exit code."""
    files = [word for word in argv if word != "--write"]
    if not files:
        print("error: name at least one card.json of jepa-jax check-gpu", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        cards = [read_json(file, "run jepa-jax check-gpu --output again") for file in files]
        factors = read_json(TABLE_FILE, "install the package again")
        new = refitted([m for card in cards for m in card_measurements(card, load_table())], factors)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if "--write" in argv:
        write_json(TABLE_FILE, new)
    print(json.dumps(new["train"]))
    return EXIT_OK


def effect_names(measurements: Sequence[Measurement]) -> list[Effect]:
    """Returns all effects of measurements, in a fixed order."""
    return sorted({effect for m in measurements for parts in m.effects.values() for effect in parts})


def left_out_errors(
    measurements: Sequence[Measurement], whole: Fit, group: Callable[[Measurement], Hashable] = lambda m: m.group
) -> list[float]:
    """Returns the error of each measurement under a fit that saw none of its group."""
    names = list(whole.effects)
    groups = [group(measurement) for measurement in measurements]
    fits = {
        one: fit([m for m, other in zip(measurements, groups, strict=True) if other != one], names, whole)
        for one in sorted(set(groups), key=str)
    }
    return [fits[one].error(measurement) for measurement, one in zip(measurements, groups, strict=True)]


def error_summary(errors: Sequence[float]) -> dict[str, float]:
    """Returns the median and the ninth tenth of absolute errors."""
    sizes = np.abs(errors)
    return {"median_abs_error": float(np.median(sizes)), "p90_abs_error": float(np.quantile(sizes, 0.9))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
