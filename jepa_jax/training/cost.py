"""Predicts how long a run takes on this machine, and how much of that is evaluation.

Before the first step from the operations of the traced step and of the encoder, afterwards from measured steps.
"""

import dataclasses
from collections.abc import Mapping

import jax

from jepa_jax.config.groups import Config
from jepa_jax.data.contract import Source
from jepa_jax.data.photos.crops import batch_spec
from jepa_jax.data.pipeline import abstract_on
from jepa_jax.evals.evaluators import EvaluationContext, Evaluator, Moment, Stage, moment_after
from jepa_jax.profiling.compilations import traced_flops
from jepa_jax.profiling.speed import peak_flops
from jepa_jax.program.build import Length, Program
from jepa_jax.program.describe import encoder_flops

# Share of the peak that steps are assumed to reach (docs/results/costs.md); measured steps correct it.
REACHED = {"cpu": 0.16, "gpu": 0.3}
REACHED_BY_LARGE = 0.38  # on a CPU: the matrix products of large elements are large
LARGE_FLOPS = 1e9  # of a step, per element
LONG_SECONDS = 3600.0  # from here on a CPU run names what is shorter
SHORTER = (
    "quickstart (2 min) and cifar10_cpu (20 min) are made for CPUs, --config.train.max_steps=N ends a run earlier, and "
    "jepa-jax plan predicts it for a GPU"
)


def evaluations(config: Config, length: Length, evaluators: Mapping[str, Evaluator]) -> dict[int, float]:
    """Returns step -> how many elements the model is applied to by the evaluations after it; those of the end apart.

    The end of the run has the key `length.total_steps + 1`.
    """
    every = config.eval.every_steps
    steps = {0, *range(0, length.total_steps + 1, length.steps_per_epoch)}
    steps |= set(range(0, length.total_steps + 1, every)) if every else set()
    moments = {step: moment_after(step, length.steps_per_epoch) for step in sorted(steps)}
    end = Moment(Stage.FINAL, length.total_steps, length.total_steps // length.steps_per_epoch)
    moments[length.total_steps + 1] = end
    found: dict[int, float] = {}
    for step, moment in moments.items():
        due = [one.elements(moment) for one in evaluators.values() if one.due(moment)]
        found[step] = sum(due) + (config.eval.calibration_images if any(due) else 0)
    return found


def all_counted(evaluators: Mapping[str, Evaluator], moment: Moment) -> bool:
    """Returns whether all evaluators that are due at a moment say how many elements they apply the model to."""
    return all(one.elements(moment) for one in evaluators.values() if one.due(moment))


@dataclasses.dataclass(frozen=True)
class Cost:
    """The work of a run.

    Attributes:
      steps: of training.
      step_flops: operations of a step.
      elements: step -> elements that are evaluated after it (see `evaluations`).
      element_flops: operations of an evaluated element; 0 if the method has no encoder.
      rate: operations per second that steps are expected to reach here; None if it is unknown.
    """

    steps: int
    step_flops: float
    elements: Mapping[int, float]
    element_flops: float
    rate: float | None

    @property
    def share(self) -> float:
        """The part of the operations that evaluation takes."""
        evaluation = sum(self.elements.values()) * self.element_flops
        return evaluation / max(evaluation + self.steps * self.step_flops, 1.0)

    def seconds(self) -> tuple[float, float] | None:
        """Returns the predicted seconds of training and of evaluation; None if the rate of the machine is unknown."""
        if not self.rate:
            return None
        flops = self.steps * self.step_flops, sum(self.elements.values()) * self.element_flops
        return flops[0] / self.rate, flops[1] / self.rate

    def left(self, step: int, step_seconds: float, element_seconds: float | None) -> tuple[float, float]:
        """Returns seconds of training and of evaluation after a step, from measured seconds."""
        if element_seconds is None:
            element_seconds = step_seconds * self.element_flops / max(self.step_flops, 1.0)
        evaluated = sum(count for at, count in self.elements.items() if at > step)
        return (self.steps - step) * step_seconds, evaluated * element_seconds

    def in_words(self) -> list[str]:
        """Returns lines that say how long the run takes here; none if that is unknown."""
        seconds = self.seconds()
        if seconds is None:
            return []
        lines = [f"cost     about {total(*seconds)} if this machine is idle"]
        if sum(seconds) > LONG_SECONDS and jax.default_backend() == "cpu":
            lines.append(f"         that is long for a CPU: {SHORTER}")
        return lines


def total(training: float, evaluation: float) -> str:
    """Returns how long a run takes and how much of that is evaluation."""
    return roughly(training + evaluation) + (f" (evaluation {roughly(evaluation)})" if evaluation else "")


def roughly(seconds: float) -> str:
    """Returns a predicted length of time: 40 s · 12 min · 3.5 h · 8.1 days."""
    if seconds < 100:
        return f"{max(5, 5 * round(seconds / 5))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def run_cost(
    config: Config, program: Program, sources: tuple[Source, Source], evaluators: Mapping[str, Evaluator]
) -> Cost:
    """Returns the work of a run; traces the step, which `step_warnings` and the compilation do with the same trace."""
    batch = abstract_on(program.mesh, batch_spec(config, sources[0].spec), config.data.batch_size)
    tested = abstract_on(program.mesh, sources[1].spec, config.eval.batch_size)
    peak, _ = peak_flops(config.profile.peak_tflops, config.train.precision)
    step_flops = traced_flops(program.useful_step.trace(program.factory.abstract, batch))
    reached = REACHED.get(jax.default_backend())
    if jax.default_backend() == "cpu" and step_flops > LARGE_FLOPS * config.data.batch_size:
        reached = REACHED_BY_LARGE
    return Cost(
        program.length.total_steps,
        step_flops,
        evaluations(config, program.length, evaluators),
        encoder_flops(program, tested) / config.eval.batch_size,
        peak * reached if peak and reached else None,
    )


def limit_evaluation(context: EvaluationContext, cost: Cost, evaluators: Mapping[str, Evaluator]) -> Cost:
    """Reduces the evaluated images until evaluation takes at most `eval.most_share` of a run; returns its cost."""
    most = context.config.eval.most_share
    if not most or cost.share <= most or context.note:  # a smoke run is reduced already
        return cost
    affordable = most / (1 - most) * cost.steps * cost.step_flops / cost.element_flops
    why = f"Evaluation would take {100 * cost.share:.0f} % of so short a run, so it is reduced (config.eval.most_share)"
    context.reduce(affordable / sum(cost.elements.values()), why)
    return dataclasses.replace(cost, elements=evaluations(context.config, context.program.length, evaluators))
