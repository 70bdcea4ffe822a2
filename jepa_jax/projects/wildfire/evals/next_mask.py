"""Evaluator of methods that predict the next mask of a history, beside baselines and with the spread over fires."""

import functools
from collections.abc import Mapping

import numpy as np
import scipy.special

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import Grouped, Source, fixed_order
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.subset import subset
from jepa_jax.evals.evaluators import (
    UNTRAINED_CALIBRATION_IMAGES,
    EvaluationContext,
    Evaluator,
    Figures,
    Moment,
    Stage,
)
from jepa_jax.evals.features import part_of
from jepa_jax.program.step import TrainState
from jepa_jax.projects.wildfire.evals.baselines import BASELINES, Reference, Scorer, fit_logistic, read_reference
from jepa_jax.projects.wildfire.evals.boosting import fit_boosting, import_boosting
from jepa_jax.projects.wildfire.evals.exhibits import mask_exhibits
from jepa_jax.projects.wildfire.evals.predictor import Change, FrozenPredictor, same_shape_parts
from jepa_jax.projects.wildfire.evals.spread import fire_figures, fire_spread, interval_95, resampled_average_precisions
from jepa_jax.projects.wildfire.evals.truth import chosen_threshold, mask_figures, ranking_figures

EVEN_LOGIT = 0.0  # probability 1/2: the threshold where validation data cannot choose one
MOST_PIXELS = 2**28  # of a split that is evaluated: 4 GB of truth and baselines, and 1 GB for each model that is scored
THRESHOLD_ELEMENTS = 512  # of training data, by which baselines choose their threshold without validation data
FEWEST_FIRES = 30  # with fewer, what differs between two models is mostly which fires were drawn
RANKINGS = ("average_precision", "new_average_precision")
STAGES = ("", "validation_", "untrained_")  # how figures of a stage begin; the final ones have those of validation too
TITLES = {
    "average_precision": "AP",
    "new_average_precision": "newly burning",
    "f1": "F1",
    "shuffled_wind_new_average_precision": "newly burning with other wind",
}


class NextMask(Evaluator):
    """Average precision, and precision, recall, F1 and IoU at a threshold, over all known pixels of a set; in 0..1.

    Figures named `new_` are of the pixels that do not burn in the last frame, of which persistence knows nothing.
    Epochs are judged on validation data alone. The final figures are of the test split, at the threshold of the highest
    F1 on validation data; without those, or if nothing burns there, at probability 1/2. Nothing is chosen by test data.
    Baselines and what is true are computed once per run. Of a split with more than MOST_PIXELS pixels, a sample of its
    fires is evaluated.
    """

    def __init__(self, context: EvaluationContext):
        super().__init__(context)
        if missing := {"fire", "valid", "wind", "static", "target", "known", "fire_id"} - context.test.spec.keys():
            raise UserError(
                f"config.data.source = {context.config.data.source}: next_mask needs histories of masks, and elements "
                f"have no {', '.join(sorted(missing))}; use wildfire, fire_sequences, ndws or wsts"
            )
        import_boosting()  # before anything is compiled
        self.predictor = FrozenPredictor(context.config, context.program, None, None)  # gets weights in `run`
        most = max(1, MOST_PIXELS // context.test.spec["target"].size)
        self.test = whole_groups(context.test, most)
        self.validation = None if context.validation is None else whole_groups(context.validation, most)
        self._exhibits: Mapping[str, np.ndarray] = {}
        if context.validation is not None:
            self.choosable = {f"validation_{name}": "max" for name in (*RANKINGS, "f1", "iou")}

    def due(self, moment: Moment) -> bool:
        config = self.context.config.eval
        if moment.stage == Stage.EPOCH:
            return self.context.validation is not None and moment.is_test(config)
        return moment.stage == Stage.FINAL or config.untrained

    def run(self, state: TrainState, moment: Moment) -> Figures:
        images = self.context.config.eval.calibration_images
        if moment.stage == Stage.UNTRAINED:
            images = images or min(UNTRAINED_CALIBRATION_IMAGES, len(self.context.train))
        encoder = self.context.encoder(state, images)
        predictor = self.predictor.with_weights(encoder.params, encoder.stats)
        if moment.stage == Stage.UNTRAINED:
            figures = ranking_figures(self._scores(predictor, "test"), self._test.truth)
            return {f"untrained_{name}": value for name, value in figures.items()}
        validated, threshold = self._validated(predictor)
        return validated if moment.stage == Stage.EPOCH else validated | self._final(predictor, threshold)

    def _validated(self, predictor: FrozenPredictor) -> tuple[Figures, float | None]:
        """Returns figures on validation data, with those of the best baseline, and the threshold chosen there."""
        if self._validation is None:
            return {}, None
        scores, truth = self._scores(predictor, "validation"), self._validation.truth
        threshold = chosen_threshold(scores, truth)
        figures = mask_figures(scores, truth, EVEN_LOGIT if threshold is None else threshold)
        best = {name: _best(self._validation_baselines, name) for name in RANKINGS}
        figures |= {f"baseline_{name}": value for name, (value, _) in best.items()}
        return {f"validation_{name}": value for name, value in figures.items()}, threshold

    def _final(self, predictor: FrozenPredictor, chosen: float | None) -> Figures:
        truth, scores = self._test.truth, self._scores(predictor, "test")
        threshold = EVEN_LOGIT if chosen is None else chosen
        by_fire = fire_figures(scores, truth, threshold)
        figures: Figures = mask_figures(scores, truth, threshold)
        figures |= {
            "threshold": float(scipy.special.expit(threshold)),
            "threshold_is_chosen": chosen is not None,
            "test_fires": len(truth.fires),
            "test_elements": len(self.test),
            **fire_spread(by_fire),
            **self._compared(scores, figures),
        }
        shuffled = self._scores(predictor, "test", self._with_shuffled_wind)
        figures |= {f"shuffled_wind_{name}": value for name, value in ranking_figures(shuffled, truth).items()}
        figures["shuffled_wind_of_own_fire"] = self._own_winds()
        self._exhibits = mask_exhibits(self.test, truth, scores, threshold, by_fire, predictor.scores)
        return figures

    def _compared(self, scores: np.ndarray, own_figures: Figures) -> Figures:
        """Returns the figures of baselines on test data, and how far a model with these scores is ahead of the best."""
        truth = self._test.truth
        baselines = {
            name: mask_figures(self._test.scores(name), truth, self._baseline_thresholds[name]) for name in BASELINES
        }
        figures: Figures = {
            f"{name}_{figure}": value for name in BASELINES for figure, value in baselines[name].items()
        }
        for name in RANKINGS:
            best, champion = _best(baselines, name)
            if best is None:  # no pixel is positive
                continue
            own, other = (
                resampled_average_precisions(values, truth, new=name.startswith("new_"))
                for values in (scores, self._test.scores(champion))
            )
            figures[f"baseline_{name}"] = best
            figures[f"{name}_interval_95"] = interval_95(own)
            figures[f"{name}_gain"] = own_figures[name] - best
            figures[f"{name}_gain_interval_95"] = interval_95(own - other)
        return figures

    def exhibits(self) -> Mapping[str, np.ndarray]:
        """Returns the best and worst test fires, and one spread frame by frame; see `mask_exhibits`."""
        return self._exhibits

    def _scores(self, predictor: FrozenPredictor, split: str, change: Change | None = None) -> np.ndarray:
        source, progress = getattr(self, split), self.context.progress
        progress.start(f"{split} masks" if change is None else f"{split} masks, other wind", len(source))
        return predictor.scores(source, change=change, on_elements=progress.advance)

    def _with_shuffled_wind(self, indices: np.ndarray, part: Source) -> Source:
        return ShuffledWind(part, wind_donors(self._test.truth.fire[indices]))

    def _own_winds(self) -> int:
        """Returns how many elements get the wind of their own fire when winds are shuffled."""
        parts = [self._test.truth.fire[indices] for indices, _ in same_shape_parts(self.test)]
        return sum(int(np.sum(fires[wind_donors(fires)] == fires)) for fires in parts)

    # What does not depend on the model.

    @functools.cached_property
    def _fitted(self) -> dict[str, Scorer]:
        fitted: dict[str, Scorer] = {}
        for name, fit in (("logistic", fit_logistic), ("boosting", fit_boosting)):
            self.context.progress.start(f"fitting {name}", len(self.context.train))
            fitted[name] = fit(self.context.train, self.context.progress.advance).__call__
        return fitted

    def _read(self, source: Source, what: str) -> Reference:
        fitted = self._fitted
        self.context.progress.start(f"baselines, {what}", len(source))
        return read_reference(source, fitted, self.context.progress.advance)

    @functools.cached_property
    def _test(self) -> Reference:
        return self._read(self.test, "test")

    @functools.cached_property
    def _validation(self) -> Reference | None:
        return None if self.validation is None else self._read(self.validation, "validation")

    @functools.cached_property
    def _baseline_thresholds(self) -> dict[str, float]:
        """Thresholds with the highest F1 on validation data, or else on training data."""
        reference = self._validation or self._read(part_of(self.context.train, THRESHOLD_ELEMENTS), "train")
        chosen = {name: chosen_threshold(reference.scores(name), reference.truth) for name in BASELINES}
        return {name: np.inf if threshold is None else threshold for name, threshold in chosen.items()}

    @functools.cached_property
    def _validation_baselines(self) -> dict[str, dict[str, float | None]]:
        assert self._validation is not None  # asked for after validation only
        return {name: ranking_figures(self._validation.scores(name), self._validation.truth) for name in BASELINES}

    # What a person reads.

    def in_words(self, figures: Figures) -> str:
        stage = next((stage for stage in STAGES if f"{stage}average_precision" in figures), "")
        words = ["validation:"] if stage == "validation_" else []
        for name, title in TITLES.items():
            value, best = figures.get(stage + name), figures.get(f"{stage}baseline_{name}")
            if value is not None:
                words.append(f"{title} {value:.3f}" + ("" if best is None else f" (best baseline {best:.3f})"))
        return "  ".join(words)

    def caveat(self, figures: Figures) -> str | None:
        fires, elements, whole = figures["test_fires"], figures["test_elements"], len(self.context.test)
        notes = []
        if fires < FEWEST_FIRES:
            notes.append(f"{fires} test fires prove nothing; other fires could give quite different figures")
        if elements < whole:
            notes.append(f"figures are of {elements:,} of {whole:,} test elements, whole fires drawn with a fixed seed")
        if not figures["threshold_is_chosen"]:
            why = "nothing is held out (data.validation = 0)" if self.validation is None else "nothing held out burns"
            notes.append(f"{why}: masks are cut at probability 0.5")
        if own := figures["shuffled_wind_of_own_fire"]:
            notes.append(
                f"{own:,} of {elements:,} elements got wind of their own fire where winds were shuffled, for want of "
                "other fires: that understates how much the model relies on wind"
            )
        return "; ".join(notes) or None


def _best(baselines: Mapping[str, Mapping[str, float | None]], figure: str) -> tuple[float | None, str]:
    """Returns the highest value of a figure and whose it is; None if no baseline has it."""
    values = {name: value for name, figures in baselines.items() if (value := figures[figure]) is not None}
    champion = max(values, key=lambda name: values[name], default="")
    return values.get(champion), champion


def whole_groups(source: Source, count: int) -> Source:
    """Returns as many groups of a source, drawn by `fixed_order`, as have at most `count` elements together.

    The source itself if it has no more; a part of the first group if that alone has more.
    """
    if len(source) <= count:
        return source
    groups = source.groups if isinstance(source, Grouped) else np.arange(len(source))
    names, sizes = np.unique(groups, return_counts=True)
    order = fixed_order(len(names))
    fitting = max(1, int(np.sum(np.cumsum(sizes[order]) <= count)))
    return subset(source, np.flatnonzero(np.isin(groups, names[order[:fitting]]))[:count])


class ShuffledWind:
    """Gives each element of a source the wind of another fire, as a control.

    An element gets the last frames of that wind; a longer history repeats its first frame.
    """

    classes = ()

    def __init__(self, source: Source, donors: np.ndarray):
        """Takes the index of the element whose wind each one gets, `donors` [N]."""
        self._source, self._donors, self.spec = source, donors, source.spec

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: np.ndarray) -> Arrays:
        own, other = self._source.batch(indices), self._source.batch(self._donors[indices])
        first = np.argmax(other["valid"], axis=1)[:, None]
        frame = np.maximum(np.arange(own["valid"].shape[1]), first)  # [B, T]
        wind = np.take_along_axis(other["wind"], frame[..., None], axis=1) * own["valid"][..., None]
        return {**own, "wind": wind}


def wind_donors(fires: np.ndarray) -> np.ndarray:
    """Returns a permutation that gives each element one of another fire, unless a fire has more than half of them."""
    order = np.argsort(fires, kind="stable")
    others = np.empty_like(order)
    others[order] = np.roll(order, len(order) // 2)
    return others
