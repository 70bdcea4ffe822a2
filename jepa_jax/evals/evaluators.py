"""Evaluators: what is measured of a model before training, after epochs, at the end of a run, and by `evaluate`.

A method names the evaluators of its runs; the training loop knows them only through `Evaluator`. The evaluators of
`jepa-jax evaluate` are `EncoderEvaluator`s, which also serve as parts of those of runs.
"""

import abc
import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from jepa_jax.base.classes import ClassTable, find_class
from jepa_jax.base.console import QuietConsole
from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config, EvalConfig
from jepa_jax.data.contract import Source
from jepa_jax.data.subset import Reader
from jepa_jax.evals.features import OnCount, ignore, part_of
from jepa_jax.evals.inference import FrozenEncoder
from jepa_jax.program.build import Program
from jepa_jax.program.step import TrainState, evaluated_variables

EVALUATORS = ClassTable(
    "EVALUATORS",
    {
        "classification": "jepa_jax.evals.classification:Classification",
        "collapse": "jepa_jax.evals.feature_quality:CollapseWatch",
        "regression": "jepa_jax.evals.ridge_probe:Regression",
        "context_and_target": "jepa_jax.evals.feature_quality:ContextAndTarget",
        "validation_loss": "jepa_jax.evals.validation_loss:ValidationLoss",
    },
)
ALWAYS_STATED = ("classification", "collapse")  # whose fields every summary has; null if a method is judged otherwise
UNTRAINED_CALIBRATION_IMAGES = 1024  # a fresh batch norm holds zeros and ones, which no evaluation should see
SMOKE_IMAGES = 512  # of each split, for a run that ends within its first epoch; a reduction leaves as many
SMOKE_LIDAR_IMAGES = 50  # likewise

Figures = dict[str, Any]  # by name: a number, or None for what the data does not allow to measure


def calibration_images_at_start(config: Config) -> int:
    """Returns how many images batch statistics are estimated on before the first step; loaded ones stay as they are."""
    return config.eval.calibration_images or (0 if config.init_from else UNTRAINED_CALIBRATION_IMAGES)


class Stage(enum.Enum):
    """Parts of a run."""

    UNTRAINED = "untrained"
    EPOCH = "epoch"
    FINAL = "final"


@dataclasses.dataclass(frozen=True)
class Moment:
    """A point of a run at which evaluators may be due: before its first step, between two steps, or at its end."""

    stage: Stage
    step: int
    epoch: int  # completed epochs
    level: int = 0  # of the method's features
    ends_epoch: bool = True  # False: due by `eval.every_steps`, within an epoch

    def ends(self, every_epochs: int) -> bool:
        """Returns whether this is the end of an epoch whose number `every_epochs` divides; 0 never does."""
        is_end = self.stage == Stage.EPOCH and self.ends_epoch
        return is_end and every_epochs > 0 and self.epoch % every_epochs == 0

    def is_test(self, config: EvalConfig) -> bool:
        """Returns whether tests are due between steps: by `eval.every_steps` if it is set, else by `every_epochs`."""
        if config.every_steps:
            return self.stage == Stage.EPOCH and self.step % config.every_steps == 0
        return self.ends(config.every_epochs)


def moment_after(step: int, steps_per_epoch: int) -> Moment:
    """Returns the moment after this many steps; 0 is before the first one."""
    stage = Stage.EPOCH if step else Stage.UNTRAINED
    return Moment(stage, step, step // steps_per_epoch, ends_epoch=step % steps_per_epoch == 0)


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much of the data the expensive evaluators use; eval.json states them."""

    fine_tune_epochs: int = 8
    fine_tune_images: int = 10_000  # of the train split, for probes of patches too, a tenth held out; 0 = all
    lidar_images: int = 500
    lidar_views: int = 10
    pictured_points: int = 800  # of the test split, in the PCA and t-SNE pictures
    untrained: bool = True  # whether evaluators of frozen features also measure the encoder before its first step


class Progress(Protocol):
    """Where evaluators report their progress. Both calls may raise `Interrupted`."""

    def start(self, what: str, total: int, /) -> None: ...

    def advance(self, amount: int, /) -> None: ...


class EvaluationContext:
    """What evaluators are made from: config and program of a run, and its data or the part of it that is evaluated."""

    def __init__(
        self,
        config: Config,
        program: Program,
        sources: tuple[Source, Source],
        *,
        validation: Source | None = None,
        progress: Progress | None = None,
        limits: Limits | None = None,
    ):
        self.config, self.program = config, program
        self.progress = progress or QuietConsole()  # where evaluators report their progress; a run sets it
        self.reader: Reader = operator.call  # by which batches are read; a run sets it
        self.limits = limits or Limits()
        self.note = ""  # what a reader of the figures must know
        self._sources, self._validation = sources, validation
        self._limit_to(config.eval.max_images)
        if program.length.total_steps < program.length.steps_per_epoch:
            self.reduce(0.0, "A run of less than an epoch: its figures only show that everything works")
        self._compiled: dict[Any, Any] = {}
        self._encoders: list[tuple[TrainState, int, FrozenEncoder]] = []

    def _limit_to(self, images: int) -> None:
        """Evaluates a sample of each split; 0 = all of it."""

        def part(source: Source) -> Source:
            return part_of(source, images, lambda read: self.reader(read))

        self.train, self.test = map(part, self._sources)
        self.validation = None if self._validation is None else part(self._validation)  # held out of training

    def reduce(self, share: float, why: str) -> None:
        """Evaluates this share of the images, 0 to 1, though not less than a smoke run does; `note` says so."""
        lengths = len(self.train), len(self.test)
        views = min(self.limits.lidar_images, lengths[1])
        lidar = min(views, max(SMOKE_LIDAR_IMAGES, round(share * views)))
        self.limits = dataclasses.replace(self.limits, lidar_images=lidar)
        if max(lengths) > SMOKE_IMAGES and not self.config.eval.max_images:
            self._limit_to(max(SMOKE_IMAGES, round(share * max(lengths))))
        if share and (len(self.train), len(self.test), lidar) == (*lengths, views):
            return  # so few images that nothing is left out
        sizes = f"{len(self.train):,} train and {len(self.test):,} test images, LiDAR on {lidar:,}"
        self.note = f"{why} (measured on {sizes})."

    def encoder_at(self, state: TrainState, moment: Moment) -> FrozenEncoder:
        """Returns the encoder of a state, calibrated as the config says for this part of a run."""
        at_start = moment.stage == Stage.UNTRAINED
        images = calibration_images_at_start(self.config) if at_start else self.config.eval.calibration_images
        return self.encoder(state, images)

    def encoder(self, state: TrainState, calibration_images: int, *, quietly: bool = False) -> FrozenEncoder:
        """Returns the encoder of a state with calibrated statistics; remembers it, and it remembers its features.

        Reports progress, and can therefore be interrupted, unless told otherwise.
        """
        for known, images, encoder in self._encoders:
            if known is state and images == calibration_images:
                return encoder
        if calibration_images and not quietly:
            self.progress.start("batch statistics", calibration_images)
        variables = evaluated_variables(state, self.config.eval.weights)
        encoder = FrozenEncoder(self.config, self.program, *variables, self._compiled, splits=(self.train, self.test))
        encoder = encoder.calibrated(self.train, calibration_images, ignore if quietly else self.progress.advance)
        return self.remember(state, calibration_images, encoder)

    def remember(self, state: TrainState, calibration_images: int, encoder: FrozenEncoder) -> FrozenEncoder:
        """Makes an encoder the one of this state; returns it."""
        self._encoders.append((state, calibration_images, encoder))
        return encoder

    def forget(self) -> None:
        """Frees the encoders; the next training step reuses the memory of their states."""
        self._encoders = []

    def evaluated_statistics(self, state: TrainState) -> Any:
        """Returns the statistics that evaluations read; None if they are those of training."""
        stats = self.encoder(state, self.config.eval.calibration_images, quietly=True).stats
        own = jax.tree.leaves(evaluated_variables(state, self.config.eval.weights)[1])
        return None if all(a is b for a, b in zip(jax.tree.leaves(stats), own, strict=True)) else stats


class Evaluator(Protocol):
    """What a run asks of an evaluator; a class of one's own inherits from it and has `due` and `run`.

    A method names it as "package.module:Class" in its `evaluators`. An exception of an evaluator does not end a run:
    the state is saved, the run goes on, and `failed_evaluators` of summary.json has the reason.

    Attributes:
      group: of its figures in the metrics.
      logs_untrained: whether its figures before training are the first of that series.
      choosable: figures after epochs that `train.keep_best` may name, with "max" or "min" for what is best; only those
        measured without test data. An instance may set it, depending on its context.
    """

    group: str = "eval"
    logs_untrained: bool = False
    choosable: Mapping[str, str] = types.MappingProxyType({})
    context: EvaluationContext

    def __init__(self, context: EvaluationContext):
        self.context = context

    @abc.abstractmethod
    def due(self, moment: Moment) -> bool:
        """Returns whether to evaluate at this moment."""

    def elements(self, moment: Moment) -> int:
        """Returns how many elements the model is applied to at a moment, to predict its cost; 0 if unknown."""
        return 0

    @abc.abstractmethod
    def run(self, state: TrainState, moment: Moment) -> Figures:
        """Returns figures by name: numbers of Python, numpy or jax, or None for what could not be measured.

        Figures of the final stage go to summary.json, where they may also be text, lists and dicts; so do figures
        before training that are named "untrained_...".
        """

    @classmethod
    def fields(cls, config: Config, *, finished: bool, warning: str | None) -> Figures:
        """Returns this evaluator's fields of summary.json, with what they hold until it has measured them.

        Args:
          finished: whether the run came to its end.
          warning: what `warning` returned at the last evaluation.
        """
        return {}

    def exhibits(self) -> Mapping[str, np.ndarray]:
        """Returns arrays of the final run that are worth showing; the run keeps them in exhibits/NAME.npz."""
        return {}

    def in_words(self, figures: Figures) -> str:
        """Returns a few words for the terminal; "" for none."""
        measured = {name: value for name, value in figures.items() if value is not None}
        return "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in measured.items())

    def warning(self, figures: Figures, untrained: Mapping[str, Any] | None) -> str | None:
        """Returns what is wrong with a model that has these figures, compared with those before training, if known."""
        return None

    def caveat(self, figures: Figures) -> str | None:
        """Returns what a reader of the final figures must know; unlike a warning it blames the data, not the model."""
        return None


def build_evaluators(context: EvaluationContext) -> dict[str, Evaluator]:
    """Returns the evaluators that the method of a run names, and the loss of what is held out."""
    held_out = () if context.validation is None else ("validation_loss",)
    names = (*context.program.method.evaluators, *held_out)
    classes = {name: find_class("method.evaluators", name, EVALUATORS) for name in names}
    for name, cls in classes.items():
        if missing := [part for part in ("due", "run") if getattr(cls, part, None) in (None, getattr(Evaluator, part))]:
            fix = "inherit from jepa_jax.evals.evaluators.Evaluator and define it"
            raise UserError(f"method.evaluators = {name!r}: has no {' and no '.join(missing)}; {fix}")
    return {name: cls(context) for name, cls in classes.items()}


def checked_figures(name: str, figures: Any, *, final: bool) -> Figures:
    """Returns the figures of an evaluator as Python values; raises TypeError that names evaluator and key.

    A figure is a number (bool, int, float, or a scalar of numpy or jax) or None; a final one may also be text, or a
    list or dict of figures.
    """

    def plain(key: str, value: Any) -> Any:
        if isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0:
            value = value.item()
        if value is None or isinstance(value, bool | int | float) or (final and isinstance(value, str)):
            return value
        if final and isinstance(value, list | tuple):
            return [plain(key, part) for part in value]
        if final and isinstance(value, dict):
            return {str(name): plain(key, part) for name, part in value.items()}
        shape = f" of shape {value.shape}" if isinstance(value, np.ndarray | jax.Array) else ""
        raise TypeError(f"evaluator {name}: {key} is {type(value).__name__}{shape}; a figure is a number or None")

    if not isinstance(figures, Mapping):
        raise TypeError(f"evaluator {name}: run returned {type(figures).__name__}; return a dict of figures by name")
    return {str(key): plain(str(key), value) for key, value in figures.items()}


def summary_fields(
    config: Config, evaluators: Mapping[str, Evaluator], warnings: Mapping[str, str | None], *, finished: bool
) -> Figures:
    """Returns the fields of summary.json that belong to evaluators, with what they hold until they are measured."""
    stated = {name: find_class("method.evaluators", name, EVALUATORS) for name in ALWAYS_STATED}
    every = stated | {name: type(evaluator) for name, evaluator in evaluators.items()}
    fields = (cls.fields(config, finished=finished, warning=warnings.get(name)) for name, cls in every.items())
    return {name: value for own in fields for name, value in own.items()}


class EncoderEvaluator(Evaluator):
    """Base class of evaluators of an encoder at one level of its features: those that `jepa-jax evaluate` offers."""

    title = ""  # what the terminal calls it
    needs = "labels"  # of several classes, "targets", which are numbers, or "maps" of classes; "" for nothing
    reads = ""  # of the encoder, beside its features: "patches" or "layers"
    has_levels = True  # whether levels differ; otherwise it is measured at level 0
    has_reference = True  # whether the untrained encoder is measured too

    def measure(self, encoder: FrozenEncoder, level: int, start: OnCount) -> Figures:
        """Returns what eval.json holds of a level of an encoder; calls `start` with the units of progress it takes."""
        raise NotImplementedError

    def due(self, moment: Moment) -> bool:
        compares = self.has_reference and self.context.limits.untrained
        return moment.stage == Stage.FINAL or (moment.stage == Stage.UNTRAINED and compares)

    def run(self, state: TrainState, moment: Moment) -> Figures:
        encoder = self.context.encoder_at(state, moment)
        untrained = ", untrained" if moment.stage == Stage.UNTRAINED else ""
        title = f"{self.title}{untrained}{level_words(encoder, moment.level)}"
        return self.measure(encoder, moment.level, functools.partial(self.context.progress.start, title))

    def in_words(self, figures: Figures) -> str:
        low, high = figures["interval_95"]
        untrained = f"untrained {figures['untrained']['accuracy']:.1f} %, " if "untrained" in figures else ""
        return f"{figures['accuracy']:.1f} % ({low:.1f} to {high:.1f}), {untrained}chance {figures['chance']:.1f} %"


def level_words(encoder: FrozenEncoder, level: int) -> str:
    """Returns what to add to a title; "" for an encoder of one level."""
    return "" if encoder.program.method.levels == 1 else f" (level {level})"
