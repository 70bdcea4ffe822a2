"""Evaluator of runs with labels: linear probe, k-NN and the probe that is trained along."""

import jax

from jepa_jax.base.selection import SELECTION_KEY
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import known_labels
from jepa_jax.evals.evaluators import EvaluationContext, Evaluator, Figures, Moment, Stage
from jepa_jax.evals.features import Split, chance, check_classes, labels_differ
from jepa_jax.evals.inference import FrozenEncoder
from jepa_jax.evals.knn import knn_accuracy
from jepa_jax.evals.linear_probe import FITS, PENALTIES, held_out_accuracy, linear_probe, top1
from jepa_jax.program.step import TrainState

# Ridge regression on all of CIFAR-10, test accuracy in percent, measured with profiling/bench_baselines.py.
CIFAR10_BASELINES = {"raw pixels": 39.4, "untrained whitened patches, pooled to 512 numbers": 60.6}


class Classification(Evaluator):
    """Accuracies of a linear probe and of k-NN on frozen features, and of the probe that is trained along; in percent.

    Features never see augmentation. Without labels, or with one class (where any encoder is right), everything but the
    feature dimension is None.
    """

    FINAL_FIGURES = (
        "probe_accuracy", SELECTION_KEY, "knn_accuracy",  # also measured before training
        "online_probe_accuracy", "chance_accuracy", "feature_dim", "probe_train_images", "probe_test_images",
    )  # fmt: skip
    WORDS = {"probe_accuracy": "linear probe", "online_probe_accuracy": "online probe", "knn_accuracy": "k-NN"}

    def __init__(self, context: EvaluationContext):
        super().__init__(context)
        self.choosable = {SELECTION_KEY: "max"} if context.train.classes else {}
        train, test = known_labels(context.train), known_labels(context.test)
        if train is not None and test is not None and not context.note:  # refuse now, not after training
            check_classes(train, test, context.train.classes)

    @classmethod
    def fields(cls, config: Config, *, finished: bool, warning: str | None) -> Figures:
        whole = config.data.source in ("cifar10", "tfds:cifar10") and not (
            config.data.num_train or config.eval.max_images
        )
        baselines = CIFAR10_BASELINES if whole else {}  # measured with all 50,000 train images
        names = [f"untrained_{name}" for name in cls.FINAL_FIGURES[:3]] + list(cls.FINAL_FIGURES if finished else ())
        return dict.fromkeys(names) | {"baselines": baselines}

    def due(self, moment: Moment) -> bool:
        config, labelled = self.context.config.eval, bool(self.context.train.classes)
        if moment.stage == Stage.EPOCH:
            return labelled and (moment.is_test(config) or moment.ends(config.knn_every_epochs))
        return moment.stage == Stage.FINAL or (labelled and config.untrained)

    def elements(self, moment: Moment) -> int:
        config, train, test = self.context.config, len(self.context.train), len(self.context.test)
        if moment.stage != Stage.EPOCH:
            return train + test
        reads_train = moment.ends(config.eval.knn_every_epochs) or config.train.keep_best == SELECTION_KEY
        return test + (train if reads_train else 0)

    def run(self, state: TrainState, moment: Moment) -> Figures:
        encoder, progress = self.context.encoder_at(state, moment), self.context.progress
        if moment.stage == Stage.EPOCH:
            return self._epoch(state, encoder, moment)
        untrained = moment.stage == Stage.UNTRAINED
        progress.start("untrained" if untrained else "linear probe", len(encoder.train) + len(encoder.test))
        train, test = encoder.features(on_images=progress.advance)
        classes = self.context.train.classes
        figures: Figures = {"probe_accuracy": None, SELECTION_KEY: None, "knn_accuracy": None}
        labelled = bool(classes) and labels_differ(train, test)
        if labelled:
            if not self.context.note:
                check_classes(train.labels, test.labels, classes)
            progress.start("fits of the linear probe", FITS)
            probe = linear_probe(train, test, len(classes), progress.advance)
            found = probe["accuracy"], probe["held_out_accuracy"], self._knn(train, test)
            figures = dict(zip(figures, found, strict=True))
        if untrained:
            return {f"untrained_{name}": value for name, value in figures.items()} if labelled else {}
        return figures | {
            "online_probe_accuracy": self._online(state, test) if labelled else None,
            "chance_accuracy": chance(train, test, len(classes)) if labelled else None,
            "feature_dim": train.features.shape[1],
            "probe_train_images": len(train.labels) if labelled else None,
            "probe_test_images": len(test.labels) if labelled else None,
        }

    def _epoch(self, state: TrainState, encoder: FrozenEncoder, moment: Moment) -> Figures:
        progress = self.context.progress
        progress.start("test", len(encoder.test))
        test = encoder.test_features(on_images=progress.advance)
        if not labels_differ(test):
            return {}
        figures: Figures = {"online_probe_accuracy": self._online(state, test)}
        if moment.ends(self.context.config.eval.knn_every_epochs):
            progress.start("k-NN", len(encoder.train))
            figures["knn_accuracy"] = self._knn(encoder.train_features(on_images=progress.advance), test)
        if self.context.config.train.keep_best == SELECTION_KEY:
            progress.start("train", len(encoder.train))
            train = encoder.train_features(on_images=progress.advance)
            progress.start("fits of the linear probe", len(PENALTIES))
            figures[SELECTION_KEY] = held_out_accuracy(train, len(self.context.train.classes), progress.advance)
        return figures

    def _knn(self, train: Split, test: Split) -> float:
        config, progress, classes = self.context.config.eval, self.context.progress, len(self.context.train.classes)
        progress.start("votes of k-NN", len(test.labels))
        return knn_accuracy(
            train, test, classes, k=config.knn_k, temperature=config.knn_temperature, on_images=progress.advance
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
        if "probe_accuracy" in values:  # the figure to quote; the others are for watching a run
            words = {name: said for name, said in self.WORDS.items() if name != "online_probe_accuracy"}
        return "  ".join(f"{said} {values[name]:.1f} %" for name, said in words.items() if values.get(name) is not None)
