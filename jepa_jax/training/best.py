"""The best state of a run: which figure chooses it, when it is kept, and when a run ends for lack of a better one."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config, TrainConfig
from jepa_jax.evals.evaluators import Evaluator, moment_after
from jepa_jax.program.build import Length
from jepa_jax.training.progress import Loop


@dataclasses.dataclass(frozen=True)
class Choice:
    """What `train.keep_best` names: a figure of an evaluator, and whether larger is better."""

    evaluator: str
    figure: str
    maximal: bool


def find_choice(config: Config, evaluators: Mapping[str, Evaluator], length: Length) -> Choice | None:
    """Returns the choice of a run; None if `train.keep_best` is empty, or the run ends before its first epoch."""
    figure = config.train.keep_best
    if not figure:
        return None
    offered = {
        offer: Choice(name, offer, best == "max")
        for name, evaluator in evaluators.items()
        for offer, best in evaluator.choosable.items()
    }
    if figure not in offered:
        names = ", ".join(offered) or "none: hold something out with data.validation, or add labels"
        raise UserError(
            f"config.train.keep_best = {figure!r}: not a figure that this run may choose by, which excludes "
            f"those of the test split; choose from: {names}"
        )
    choice = offered[figure]
    every = config.eval.every_steps or length.steps_per_epoch
    ends = range(every, length.total_steps + 1, every)
    if not ends:  # a trial of a few steps, whose last state is evaluated
        return None
    moments = (moment_after(step, length.steps_per_epoch) for step in ends)
    if not any(map(evaluators[choice.evaluator].due, moments)):
        raise UserError(
            f"config.train.keep_best = {figure!r}: is measured after no epoch of this run; set "
            f"eval.every_epochs to a number of epochs that it has ({len(ends)})"
        )
    return choice


def judge(config: TrainConfig, choice: Choice, loop: Loop, value: Any, epoch: int) -> bool:
    """Notes a figure in the progress of a run; returns whether it is the best so far.

    The best is the first of equal ones. Patience compares with the last value that improved by more than min_delta. A
    value that is not finite is never better.
    """
    progress, sign = loop.progress, 1 if choice.maximal else -1
    best, finite = progress.best, value is not None and math.isfinite(value)
    is_best = finite and (best is None or sign * (value - best["value"]) > 0)
    if is_best:
        progress.best = {"figure": choice.figure, "value": float(value), "step": loop.step, "epoch": epoch}
    reference = progress.patience_reference
    if finite and (reference is None or sign * (value - reference) > config.min_delta):
        progress.patience_reference, progress.not_improved = float(value), 0
    else:
        progress.not_improved += 1
    if config.patience and progress.not_improved >= config.patience:
        than = f" by more than {config.min_delta:g}" if config.min_delta else ""
        progress.stopped = f"{choice.figure} has not improved{than} in {progress.not_improved} evaluations"
    return is_best
