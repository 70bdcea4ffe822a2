"""Evaluator of runs with labels: linear probe, k-NN and the probe that is trained along."""

import jax

from jepa_jax.base.selection import SELECTION_KEY
from jepa_jax.data.contract import known_labels
from jepa_jax.evals.evaluators import EvaluationContext, Evaluator, Figures, Moment, Stage
from jepa_jax.evals.features import Split, chance, check_classes, labels_differ
from jepa_jax.evals.inference import FrozenEncoder
from jepa_jax.evals.knn import knn_accuracy
from jepa_jax.evals.linear_probe import FITS, PENALTIES, ProbeResult, held_out_accuracy, linear_probe, top1
from jepa_jax.program.step import TrainState


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
            return labelled and (moment.is_test(config) or moment.ends(config.knn_every_epochs))
        return moment.stage == Stage.FINAL or (labelled and config.untrained)

    def run(self, state: TrainState, moment: Moment) -> Figures:
        encoder = self.context.encoder_at(state, moment)
        if moment.stage == Stage.UNTRAINED:
            return self._untrained(encoder)
        return self._final(state, encoder) if moment.stage == Stage.FINAL else self._epoch(state, encoder, moment)

    def _untrained(self, encoder: FrozenEncoder) -> Figures:
        train, test = self._features(encoder, "untrained")
        if not labels_differ(train, test):
            return {}
        probe, knn = self._probe(train, test), self._knn(train, test)
        figures = {"probe_accuracy": probe.accuracy, "knn_accuracy": knn, SELECTION_KEY: probe.held_out_accuracy}
        return {f"untrained_{name}": value for name, value in figures.items()}

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

    def _final(self, state: TrainState, encoder: FrozenEncoder) -> Figures:
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

    def _features(self, encoder: FrozenEncoder, what: str) -> tuple[Split, Split]:
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
