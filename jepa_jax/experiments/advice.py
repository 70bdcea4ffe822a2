"""Advice beside a recommendation: what limits the speed, and what a new batch means for the learning rate."""

import math
from typing import Any

from jepa_jax.base.statistics import SpeedModel, bonferroni_level
from jepa_jax.config.groups import Config
from jepa_jax.experiments.rows import SweepRow
from jepa_jax.experiments.settings import Combination
from jepa_jax.program.optim import scaled_learning_rate

WAITING = 0.10  # share of a step from which waiting for data counts as the limit
FULL = 0.85  # share of the memory from which it counts as the limit
WORTH_SEEING = 0.05  # relative difference of speeds that is worth more repeats
MOST_PROMISED = 10.0  # times the speed: where a device waits for 90 % of the time, its own speed is hardly known


def what_limits(row: SweepRow, memory_limit_bytes: float | None = None, cores: int | None = None) -> str:
    """Says what a faster setting would have to change.

    Args:
      memory_limit_bytes: usable memory; by default what the device's allocator has.
      cores: of this machine, above which more workers load no faster; None if not known.
    """
    wait, memory = row.mean("data_wait_fraction"), row.largest("peak_memory_bytes")
    limit = memory_limit_bytes or row.shared("device_limit_bytes")
    used = memory / limit if memory and limit else None
    if wait is not None and wait > WAITING:
        factor = 1 / max(1 - wait, 1e-3)
        gain = f"at most {factor:.2f}x" if factor < MOST_PROMISED else f"more than {MOST_PROMISED:.0f}x"
        change = ""
        if cores is not None and row.combination.pipeline != "device":
            workers = row.combination.num_workers
            more = (
                f"try more than {workers} workers on {cores} cores"
                if workers < cores
                else (f"{workers} workers keep all {cores} cores busy: prepare smaller or decoded data")
            )
            change = f" ({more}, or data.pipeline=device for data that fits)"
        return (
            f"The loader limits: the device waits for data for {100 * wait:.0f} % of the time, {gain} to gain{change}."
        )
    if used is not None and used > FULL:
        return (
            f"Memory limits the batch: {100 * used:.0f} % of the available memory is used; computing limits the speed."
        )
    waiting = "" if wait is None else f": the device waits for data for {100 * wait:.1f} % of the time"
    mfu = row.mean("mfu")
    return f"Computing limits{waiting}" + (f", at {100 * mfu:.0f} % of the device's peak." if mfu else ".")


def resolution_sentence(model: SpeedModel, repeats: int, candidates: int = 2) -> str:
    """Says what a sweep of so many candidates can tell apart, and how many repeats would tell more."""
    if model.noise_percent is None:
        return "Each combination was measured once: no difference can be told from noise (--repeats=3)."
    scatter = f"One repeat scatters by {model.noise_percent:.1f} %"
    if repeats < 2:
        return f"{scatter}."
    seen = model.resolution(repeats)
    sentence = f"{scatter}: with {repeats} repeats a difference of less than {100 * seen:.1f} % stays within noise"
    if candidates > 2:
        selected = model.resolution(repeats, bonferroni_level(candidates - 1))
        sentence += f" ({100 * selected:.1f} % for the fastest of {candidates})"
    if seen <= WORTH_SEEING:
        return f"{sentence}."
    needed = model.repeats_to_resolve(WORTH_SEEING)
    return f"{sentence}, and about {needed} would show one of {100 * WORTH_SEEING:.0f} %."


def learning_rate_advice(config: Config, batch_size: int) -> dict[str, Any] | None:
    """Returns the peak rate by the linear and the square-root rule, and the `optim.lr` that gives it.

    None if the batch is that of the config.
    """
    before, optim = config.data.batch_size, config.optim
    if batch_size == before:
        return None
    scaling, reference = optim.batch_scaling, optim.reference_batch
    factor = scaled_learning_rate(1.0, batch_size, scaling, reference)  # from optim.lr to the peak, at the new batch
    peak = scaled_learning_rate(optim.lr, before, scaling, reference)
    ratio = batch_size / before
    rules = {"linear": peak * ratio, "sqrt": peak * math.sqrt(ratio)}
    advice = {name: {"peak": value, "optim.lr": value / factor} for name, value in rules.items()}
    already = {
        "none": "optim.batch_scaling = none does not change the rate by itself",
        "linear": "optim.batch_scaling = linear already follows the linear rule: keep optim.lr for that",
        "sqrt": "optim.batch_scaling = sqrt already follows the square-root rule: keep optim.lr for that",
    }[scaling]
    text = (
        f"The batch also changes what is learned: {before:,} -> {batch_size:,} images per step. "
        f"The peak rate of {peak:.3g} would be "
        f"{rules['linear']:.3g} by the linear rule (optim.lr={advice['linear']['optim.lr']:.3g}), "
        f"{rules['sqrt']:.3g} by the square-root rule (optim.lr={advice['sqrt']['optim.lr']:.3g}). {already}."
    )
    return {"batch_size": [before, batch_size], "peak": peak, "batch_scaling": scaling, **advice, "text": text}


def batch_sentences(config: Config, chosen: Combination) -> list[str]:
    """Says what a combination changes in what is learned: the learning rate, and the images that losses see."""
    advice = learning_rate_advice(config, chosen.batch_size)
    sentences = [advice["text"]] if advice else []
    before, after = config.train.accum_steps, chosen.grad_accum_steps
    if before != after:
        part = chosen.batch_size // after
        sentences.append(
            f"Accumulation {before} -> {after}: losses and norms over a batch see {part:,} images at a time."
        )
    return sentences
