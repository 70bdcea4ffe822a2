"""Evaluators: what a run measures of its model before training, after epochs and at the end.

A method names its evaluators; the training loop knows them only through `Evaluator`.
"""

import dataclasses
import enum
import types
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from jepa_jax.base.classes import ClassTable, find_class
from jepa_jax.base.console import QuietConsole
from jepa_jax.base.selection import SELECTION_KEY
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import Source, known_labels
from jepa_jax.data.sources import OnSkipped
from jepa_jax.evals.collapse import collapse_warning, feature_spread
from jepa_jax.evals.feature_quality import lidar
from jepa_jax.evals.features import OnCount, Split, chance, check_classes, ignore, labels_differ
from jepa_jax.evals.inference import FrozenEncoder
from jepa_jax.evals.knn import knn_accuracy
from jepa_jax.evals.linear_probe import FITS, PENALTIES, ProbeResult, held_out_accuracy, linear_probe, top1
from jepa_jax.evals.sources import part_of
from jepa_jax.evals.trained_encoder import EvaluatedEncoder
from jepa_jax.program.build import Program
from jepa_jax.program.step import TrainState, evaluated_variables

EVALUATORS = ClassTable(
    "EVALUATORS",
    {
        "classification": "jepa_jax.evals.evaluators:Classification",
        "collapse": "jepa_jax.evals.evaluators:CollapseWatch",
        "validation_loss": "jepa_jax.evals.validation_loss:ValidationLoss",
    },
)
UNTRAINED_CALIBRATION_IMAGES = 1024  # a fresh batch norm holds zeros and ones, which no evaluation should see

WATCHED_IMAGES = 1024  # test images that the collapse watch looks at
SMOKE_IMAGES = 512  # of each split, for a run that ends within its first epoch
LIDAR_IMAGES, LIDAR_VIEWS = 500, 10

Figures = dict[str, Any]  # by name: a number, or None for what the data does not allow to measure


def calibration_images_at_start(config: Config) -> int:
    """Returns how many images batch statistics are estimated on before the first step; loaded ones stay as they are."""
    loaded = getattr(config.model, "init_from", "")
    return config.eval.calibration_images or (0 if loaded else UNTRAINED_CALIBRATION_IMAGES)


class Stage(enum.Enum):
    """Parts of a run."""

    UNTRAINED = "untrained"
    EPOCH = "epoch"
    FINAL = "final"


@dataclasses.dataclass(frozen=True)
class Moment:
    """A point of a run at which evaluators may be due: before its first step, after an epoch, or at its end."""

    stage: Stage
    step: int
    epoch: int  # completed epochs

    def ends(self, every_epochs: int) -> bool:
        """Returns whether this is the end of an epoch whose number `every_epochs` divides; 0 never does."""
        return self.stage == Stage.EPOCH and every_epochs > 0 and self.epoch % every_epochs == 0


class Progress(Protocol):
    """Where evaluators report their progress. Both calls may raise `Interrupted`."""

    def start(self, what: str, total: int, /) -> None: ...

    def advance(self, amount: int, /) -> None: ...


class EvaluationContext:
    """What evaluators are made from.

    Attributes:
      config: the config of the run.
      program: its method, model structure and mesh.
      train, test: its data, or the part of it that is evaluated.
      validation: what is held out of training, or the part of it that is evaluated; None if nothing is.
      progress: see `Progress`.
      smoke: whether the run ends within its first epoch, so that its accuracies mean nothing.
    """

    def __init__(
        self,
        config: Config,
        program: Program,
        sources: tuple[Source, Source],
        *,
        validation: Source | None = None,
        progress: Progress | None = None,
        on_skipped: OnSkipped = lambda names: None,
    ):
        self.config, self.program, self.progress = config, program, progress or QuietConsole()
        self.smoke = program.length.total_steps < program.length.steps_per_epoch
        limit = config.eval.max_images or (SMOKE_IMAGES if self.smoke else 0)
        self.train, self.test = (part_of(source, limit, on_skipped) for source in sources)
        self.validation = None if validation is None else part_of(validation, limit, on_skipped)
        self._compiled: dict[Any, Any] = {}
        self._newest: tuple[TrainState, int, EvaluatedEncoder] | None = None

    def encoder(self, state: TrainState, calibration_images: int, *, quietly: bool = False) -> EvaluatedEncoder:
        """Returns the encoder of a state with calibrated statistics; remembers it, and it remembers its features.

        Reports progress, and can therefore be interrupted, unless told otherwise.
        """
        if self._newest is None or self._newest[0] is not state or self._newest[1] != calibration_images:
            if calibration_images and not quietly:
                self.progress.start("batch statistics", calibration_images)
            params, stats = self.calibrated(state, calibration_images, ignore if quietly else self.progress.advance)
            encoder = EvaluatedEncoder(
                self.config, self.program, params, stats, self._compiled, train=self.train, test=self.test
            )
            self._newest = state, calibration_images, encoder
        return self._newest[2]

    def calibrated(self, state: TrainState, images: int, on_images: OnCount = ignore) -> tuple[Any, Any]:
        """Returns params and stats that evaluations read, with batch statistics of unaugmented images."""
        variables = evaluated_variables(state, self.config.eval.weights)
        encoder = FrozenEncoder(self.config, self.program, *variables, self._compiled)
        encoder = encoder.calibrated(self.train, images, on_images)
        return encoder.params, encoder.stats

    def forget(self) -> None:
        """Frees the newest encoder; the next training step reuses the memory of its state."""
        self._newest = None

    def evaluated_statistics(self, state: TrainState) -> Any:
        """Returns the statistics that evaluations read; None if they are those of training."""
        stats = self.encoder(state, self.config.eval.calibration_images, quietly=True).stats
        own = jax.tree.leaves(evaluated_variables(state, self.config.eval.weights)[1])
        return None if all(a is b for a, b in zip(jax.tree.leaves(stats), own, strict=True)) else stats


class Evaluator:
    """Base class of evaluators; a user's own may be named "package.module:Class".

    Attributes:
      group: of its figures in the metrics.
      logs_untrained: whether its figures before training are the first of that series.
      choosable: figures after epochs that `train.keep_best` may name, with "max" or "min" for what is best; only those
        measured without test data. An instance may set it, depending on its context.
    """

    group = "eval"
    logs_untrained = False
    choosable: Mapping[str, str] = types.MappingProxyType({})

    def __init__(self, context: EvaluationContext):
        self.context = context

    def due(self, moment: Moment) -> bool:
        """Returns whether to evaluate at this moment."""
        raise NotImplementedError

    def run(self, state: TrainState, moment: Moment) -> Figures:
        """Returns figures by name; those of the final stage go to summary.json."""
        raise NotImplementedError

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
    return {name: find_class("method.evaluators", name, EVALUATORS)(context) for name in names}


class Classification(Evaluator):
    """Accuracies of a linear probe and of k-NN on frozen features, and of the probe that is trained along; in percent.

    Features never see augmentation. Without labels, or with one class (where any encoder is right), everything but the
    feature dimension is None.
    """

    WORDS = {"probe_accuracy": "linear probe", "online_probe_accuracy": "online probe", "knn_accuracy": "k-NN"}

    def __init__(self, context: EvaluationContext):
        super().__init__(context)
        self.choosable = {SELECTION_KEY: "max"} if context.train.classes else {}
        train, test = known_labels(context.train), known_labels(context.test)
        if train is not None and test is not None and not context.smoke:  # refuse now, not after training
            check_classes(train, test, context.train.classes)

    def due(self, moment: Moment) -> bool:
        config, labelled = self.context.config.eval, bool(self.context.train.classes)
        if moment.stage == Stage.EPOCH:
            return labelled and (moment.ends(config.every_epochs) or moment.ends(config.knn_every_epochs))
        return moment.stage == Stage.FINAL or (labelled and config.untrained)

    def run(self, state: TrainState, moment: Moment) -> Figures:
        config, progress = self.context.config.eval, self.context.progress
        if moment.stage == Stage.UNTRAINED:
            encoder = self.context.encoder(state, calibration_images_at_start(self.context.config))
            train, test = self._features(encoder, "untrained")
            if not labels_differ(train, test):
                return {}
            probe, knn = self._probe(train, test), self._knn(train, test)
            figures: Figures = {
                "probe_accuracy": probe.accuracy,
                "knn_accuracy": knn,
                SELECTION_KEY: probe.held_out_accuracy,
            }
            return {f"untrained_{name}": value for name, value in figures.items()}
        encoder = self.context.encoder(state, config.calibration_images)
        if moment.stage == Stage.FINAL:
            return self._final(state, encoder)
        progress.start("test", len(encoder.test))
        test = encoder.test_features(on_images=progress.advance)
        if not labels_differ(test):
            return {}
        figures = {"online_probe_accuracy": self._online(state, test)}
        if moment.ends(config.knn_every_epochs):
            progress.start("k-NN", len(encoder.train))
            figures["knn_accuracy"] = self._knn(encoder.train_features(on_images=progress.advance), test)
        if self.context.config.train.keep_best == SELECTION_KEY:
            progress.start("train", len(encoder.train))
            train = encoder.train_features(on_images=progress.advance)
            progress.start("fits of the linear probe", len(PENALTIES))
            figures[SELECTION_KEY] = held_out_accuracy(train, len(self.context.train.classes), progress.advance)
        return figures

    def _final(self, state: TrainState, encoder: EvaluatedEncoder) -> Figures:
        train, test = self._features(encoder, "linear probe")
        labelled = bool(self.context.train.classes) and labels_differ(train, test)
        probe = self._probe(train, test) if labelled else None
        return {
            "probe_accuracy": probe and probe.accuracy,
            SELECTION_KEY: probe and probe.held_out_accuracy,
            "knn_accuracy": self._knn(train, test) if labelled else None,
            "online_probe_accuracy": self._online(state, test) if labelled else None,
            "chance_accuracy": chance(train, test, len(self.context.train.classes)) if labelled else None,
            "feature_dim": train.features.shape[1],
            "probe_train_images": len(train.labels) if labelled else None,
            "probe_test_images": len(test.labels) if labelled else None,
        }

    def _features(self, encoder: EvaluatedEncoder, what: str) -> tuple[Split, Split]:
        self.context.progress.start(what, len(encoder.train) + len(encoder.test))
        return encoder.features(on_images=self.context.progress.advance)

    def _probe(self, train: Split, test: Split) -> ProbeResult:
        if not self.context.smoke:
            check_classes(train.labels, test.labels, self.context.train.classes)
        self.context.progress.start("fits of the linear probe", FITS)
        return linear_probe(train, test, len(self.context.train.classes), self.context.progress.advance)

    def _knn(self, train: Split, test: Split) -> float:
        config, progress = self.context.config.eval, self.context.progress
        progress.start("votes of k-NN", len(test.labels))
        return knn_accuracy(
            train,
            test,
            len(self.context.train.classes),
            k=config.knn_k,
            temperature=config.knn_temperature,
            on_images=progress.advance,
        )

    def _online(self, state: TrainState, test: Split) -> float | None:
        probe, step = jax.device_get((state.params["probe"], state.step))
        was_fed = step == 0 or probe["kernel"].any()  # a loss need not return features
        return top1(probe, test.features, test.labels) if was_fed else None

    def in_words(self, figures: Figures) -> str:
        if not figures:
            return "all images are of one class: no accuracy is measured"
        values = {name.removeprefix("untrained_"): value for name, value in figures.items()}
        words = self.WORDS | ({SELECTION_KEY: "held-out probe"} if SELECTION_KEY in figures else {})
        return "  ".join(f"{said} {values[name]:.1f} %" for name, said in words.items() if values.get(name) is not None)


class CollapseWatch(Evaluator):
    """How far features spread, which needs no labels.

    Looks at features before their last normalisation; at the end also at LiDAR, of features as they are used.
    """

    group = "collapse"
    logs_untrained = True

    def due(self, moment: Moment) -> bool:
        return True

    def run(self, state: TrainState, moment: Moment) -> Figures:
        final, progress = moment.stage == Stage.FINAL, self.context.progress
        images = self.context.config.eval.calibration_images
        if moment.stage == Stage.UNTRAINED:
            images = calibration_images_at_start(self.context.config)
        encoder = self.context.encoder(state, images)
        progress.start("collapse watch", min(WATCHED_IMAGES, len(encoder.test)))
        spread = feature_spread(encoder.raw_features(0, WATCHED_IMAGES, progress.advance).features)
        if not final:
            return spread
        return {"effective_rank": spread["effective_rank"], "lidar": self._lidar(encoder)}

    def _lidar(self, encoder: EvaluatedEncoder) -> float | None:
        if "image" not in encoder.test.spec or not self.context.config.data.augment.is_random:
            return None
        images = min(LIDAR_IMAGES, len(encoder.test))
        self.context.progress.start("LiDAR", images * LIDAR_VIEWS)
        return lidar(encoder.view_features(0, images, LIDAR_VIEWS, self.context.progress.advance))

    def in_words(self, figures: Figures) -> str:
        return ""

    def warning(self, figures: Figures, untrained: Mapping[str, Any] | None) -> str | None:
        return collapse_warning(figures, untrained)
