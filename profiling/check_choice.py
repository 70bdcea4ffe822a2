"""Simulates sweeps and measures how much speed the choice of a sweep gives away.

  python profiling/check_choice.py [--sweeps=1000]

Each sweep has six settings, three repeats and normal noise of 2, 5 or 12 % per repeat on top of rounds that are slow as
a whole. True speeds are drawn within a factor of two, within 10 %, or are a ladder of steps of 5 %; memory is drawn
independently. The real rule (`recommendation.choose`) chooses. The loss is one minus the true speed of the choice over
that of the fastest setting. It must be at most 0.5, 1.5 and 4 % in the mean of each kind of sweep.

`with config` makes one of the settings, drawn at random, the config as given: it is kept unless another one is shown to
be faster, so the loss is larger by what three repeats cannot show. `false alarms` counts sweeps of six equal settings
in which another one is said to be faster than the config; at most 5 % may be.
"""

import statistics
import sys
from collections.abc import Iterator

import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.base.statistics import fit_speeds
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser
from jepa_jax.experiments.recommendation import SHOWN, choose_settings
from jepa_jax.experiments.rows import OK, SweepRow, TrialFigures, TrialResult
from jepa_jax.experiments.settings import Combination

SETTINGS, REPEATS = 6, 3
MOST_LOSS = {0.02: 0.005, 0.05: 0.015, 0.12: 0.04}  # noise of one repeat -> mean loss of speed
MOST_FALSE_ALARMS = 0.05
ROUND_NOISE = 0.05
KINDS = ("factor of two", "within 10 %", "ladder of 5 %")


def add_flags(parser: Parser) -> None:
    parser.add_flag("sweeps", "N", "simulated sweeps of each kind and noise", 1000, least=50)


def true_speeds(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Returns the speeds of the settings of one sweep."""
    if kind == "ladder of 5 %":
        return rng.permutation(100 * 1.05 ** np.arange(SETTINGS))
    low, high = {"factor of two": (50.0, 100.0), "within 10 %": (90.0, 100.0), "equal": (100.0, 100.0)}[kind]
    return np.exp(rng.uniform(np.log(low), np.log(high), SETTINGS))


def simulated_rows(speeds: np.ndarray, noise: float, rng: np.random.Generator) -> list[SweepRow]:
    """Returns the rows that a sweep of settings with these true speeds might have measured."""
    rounds = ROUND_NOISE * rng.normal(size=REPEATS)
    rows = []
    for index, speed in enumerate(speeds):
        measured = speed * np.exp(rounds + noise * rng.normal(size=REPEATS))
        memory = int(rng.uniform(1e9, 2e10))
        repeats = tuple(
            TrialResult(OK, figures=TrialFigures(float(value), peak_memory_bytes=memory), round=number)
            for number, value in enumerate(measured)
        )
        rows.append(SweepRow(Combination(8 * (index + 1), 0, 1, "float32", "none", "grain"), OK, "", repeats))
    return rows


def losses(kind: str, noise: float, sweeps: int, *, with_config: bool) -> Iterator[tuple[float, bool]]:
    """Yields of each sweep the share of speed that the choice gives away, and whether a gain was said to be shown."""
    rng = np.random.default_rng(0)
    for _ in range(sweeps):
        speeds = true_speeds(kind, rng)
        rows = simulated_rows(speeds, noise, rng)
        found = choose_settings(rows, fit_speeds(rows), rows[0] if with_config else None)
        yield 1 - float(speeds[rows.index(found.best)] / speeds.max()), found.verdict == SHOWN


def check_choice(arguments: Arguments, console: Console) -> Result:
    sweeps = arguments.sweeps
    rows, lines = [], []
    for noise, most in MOST_LOSS.items():
        for kind in KINDS:
            free, kept = ([one for one, _ in losses(kind, noise, sweeps, with_config=c)] for c in (False, True))
            error = statistics.stdev(free) / sweeps**0.5
            row = {
                "noise": noise, "speeds": kind, "mean_loss": statistics.fmean(free), "standard_error": error,
                "most": most, "mean_loss_with_config": statistics.fmean(kept),
            }  # fmt: skip
            rows.append(row)
            lines.append(
                f"noise {noise:.0%}, {kind}: mean loss {row['mean_loss']:.2%} +- {error:.2%} (at most {most:.1%}), "
                f"with config {row['mean_loss_with_config']:.2%}"
            )
    alarms = {
        noise: statistics.fmean(shown for _, shown in losses("equal", noise, sweeps, with_config=True))
        for noise in MOST_LOSS
    }
    lines += [f"noise {noise:.0%}, six equal settings: false alarms {share:.1%}" for noise, share in alarms.items()]
    checks = {
        "losses_small": all(row["mean_loss"] <= row["most"] for row in rows),
        "few_false_alarms": max(alarms.values()) <= MOST_FALSE_ALARMS,
    }
    result = {"sweeps": sweeps, "rows": rows, "false_alarms": list(alarms.values()), **checks}
    return Result([result | {"passed": all(checks.values())}], "\n".join(lines), 0 if all(checks.values()) else 1)


if __name__ == "__main__":
    sys.exit(Command("profiling/check_choice.py", __doc__, add_flags, check_choice, program="python").main())
