"""Limits draw a sample: with images sorted by class, every limited part shows every class."""

import dataclasses

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import image_spec, sample
from jepa_jax.data.sources import open_splits
from jepa_jax.evals import fine_tune as fine_tune_module
from jepa_jax.evals.evaluators import (
    SMOKE_IMAGES,
    SMOKE_LIDAR_IMAGES,
    EvaluationContext,
    Limits,
    Moment,
    Stage,
    build_evaluators,
)
from jepa_jax.evals.feature_quality import WATCHED_IMAGES, FeatureQuality
from jepa_jax.evals.features import Split, check_classes
from jepa_jax.evals.fine_tune import FineTune
from jepa_jax.evals.inference import FrozenEncoder
from jepa_jax.program.build import INITIAL_ELEMENTS, Length, initial_sample
from jepa_jax.training.cost import Cost, evaluations, limit_evaluation
from tests.stepping import build_program
from tests.tiny import tiny_config

CLASSES = ("bird", "cat", "deer", "dog")


class SortedByClass:
    """A split whose images are stored class after class, a quarter of them each; remembers what was read."""

    classes, spec = CLASSES, image_spec(16)

    def __init__(self, length=4096):
        self._length, self.read = length, []

    def __len__(self):
        return self._length

    def batch(self, indices):
        labels = (4 * np.asarray(indices) // len(self)).astype(np.int32)
        self.read.append(labels)
        return {"image": np.broadcast_to((60 * labels)[:, None, None, None], (len(labels), 16, 16, 3)).astype(np.uint8),
                "label": labels}  # fmt: skip


def labels_of(source):
    return source.batch(np.arange(len(source)))["label"]


def all_classes(labels, at_least=0.15):
    """Returns whether each class has at least this share."""
    return bool((np.bincount(labels, minlength=4) >= at_least * len(labels)).all())


@pytest.fixture(scope="module")
def program():
    return build_program(tiny_config(mesh__data=1), batch=SortedByClass().batch(np.arange(16)))


def context_of(program, **overrides):
    config = tiny_config(mesh__data=1, **overrides)
    length = dataclasses.replace(program.length, total_steps=1 if "train__max_steps" in overrides else 10**6)
    sources = SortedByClass(), SortedByClass()
    return EvaluationContext(config, dataclasses.replace(program, length=length), sources), sources


def test_a_sample_is_fixed_and_grows_by_adding_to_it():
    np.testing.assert_array_equal(sample(1000, 10), sample(1000, 10))
    np.testing.assert_array_equal(sample(1000, 10), sample(1000, 50)[:10])
    assert len(set(sample(1000, 999))) == 999
    for unlimited in (0, 1000, 2000):
        np.testing.assert_array_equal(sample(1000, unlimited), np.arange(1000))


def test_num_train_and_num_test_of_a_sorted_npz(tmp_path):
    images, labels = np.zeros((400, 16, 16, 3), np.uint8), np.repeat(np.arange(10), 40)
    np.savez(tmp_path / "both.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    data = tiny_config(
        data__source="npz", data__dir=str(tmp_path / "both.npz"), data__num_train=200, data__num_test=150
    )
    for source, count in zip(open_splits(data.data), (200, 150), strict=True):
        found = np.bincount(labels_of(source), minlength=10)
        assert found.sum() == count and found.min() >= 0.05 * count


def test_the_images_that_a_method_initialises_itself_with():
    labels = initial_sample(SortedByClass())["label"]
    assert len(labels) == INITIAL_ELEMENTS and all_classes(labels)


@pytest.mark.parametrize(
    "overrides, images", [({"eval__max_images": 300}, 300), ({"train__max_steps": 1}, SMOKE_IMAGES)]
)
def test_the_evaluated_part_of_each_split(program, overrides, images):
    context, _ = context_of(program, **overrides)
    for part in (context.train, context.test):
        assert len(part) == images and all_classes(labels_of(part))


def test_evaluation_takes_a_limited_share_of_a_short_run(program):
    context, _ = context_of(program, eval__most_share=0.25)
    context.program = dataclasses.replace(program, length=Length(steps_per_epoch=1000, total_steps=8192))
    evaluators = build_evaluators(context)
    cost = Cost(
        8192, 1.0, evaluations(context.config, context.program.length, evaluators), element_flops=1.0, rate=None
    )
    assert cost.share > 0.5 and len(context.train) == 4096 and not context.note
    limited = limit_evaluation(context, cost, evaluators)
    assert limited.share < cost.share and SMOKE_IMAGES <= len(context.train) < 4096 > len(context.test)
    assert "config.eval.most_share" in context.note and f"{len(context.train):,} train" in context.note
    few, _ = context_of(program, eval__max_images=SMOKE_LIDAR_IMAGES)
    few.reduce(0.5, "x")
    assert not few.note  # nothing is left out
    context, _ = context_of(program, eval__max_images=1000)
    limit_evaluation(context, cost, evaluators)
    assert len(context.train) == 1000  # what the user asks for


def test_every_batch_that_calibrates_statistics(program):
    state = program.factory.create(0, SortedByClass().batch(np.arange(16)))
    encoder = FrozenEncoder(tiny_config(mesh__data=1, eval__batch_size=64), program, state.params["model"], state.stats)
    for length, images in ((4096, 128), (128, 128)):
        source = SortedByClass(length)
        encoder.calibrated(source, images)
        assert [len(batch) for batch in source.read] == [64, 64] and all(map(all_classes, source.read))


def test_lidar_does_not_depend_on_the_size_of_batches(program):
    sources, found = open_splits(tiny_config().data), []
    state = program.factory.create(0, sources[0].batch(np.arange(64)))
    for size in (64, 7):
        config, limits = tiny_config(mesh__data=1, eval__batch_size=size), Limits(lidar_images=20, lidar_views=3)
        context = EvaluationContext(config, program, sources, limits=limits)
        found.append(FeatureQuality(context).lidar(context.encoder(state, 0), 0, lambda total: None)["lidar"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_images_of_the_collapse_watch_and_of_lidar(program):
    context, (train, test) = context_of(program, eval__calibration_images=0, eval__batch_size=256)
    state = program.factory.create(0, SortedByClass().batch(np.arange(16)))
    watch = build_evaluators(context)["collapse"]
    watch.run(state, Moment(Stage.EPOCH, 1, 1))
    assert len(np.concatenate(train.read)) == WATCHED_IMAGES and all_classes(np.concatenate(train.read))
    assert not test.read  # what may end a run is no test image
    watch.run(state, Moment(Stage.FINAL, 1, 1))  # its raw features are known
    assert len(np.unique(np.concatenate(test.read))) == 4 and all_classes(np.concatenate(test.read))


@pytest.mark.parametrize("count", [200, 0])
def test_the_images_of_fine_tuning(program, count, monkeypatch):
    source, used = SortedByClass(), []
    split = Split(np.zeros((len(source), 1), np.float32), labels_of(source))
    encoder = FrozenEncoder(tiny_config(), program, None, None, splits=(source, source))
    encoder.store.known |= {"level0_train": split, "level0_test": split}

    def fine_tune(encoder, sources, features, **options):
        used.append((labels_of(sources[0]), features.labels))
        return {"accuracy": 50.0}, None

    monkeypatch.setattr(fine_tune_module, "fine_tune", fine_tune)
    context = EvaluationContext(tiny_config(), program, (source, source), limits=Limits(fine_tune_images=count))
    FineTune(context).measure(encoder, 0, lambda total: None)
    ((labels, of_features),) = used
    np.testing.assert_array_equal(labels, of_features)
    assert len(labels) == (count or len(source)) and all_classes(labels)


def test_a_probe_without_classes_of_the_test_images_is_refused_by_name():
    check_classes(np.arange(4), np.array([1, 2]), CLASSES)  # train may show more
    with pytest.raises(UserError, match=r"the 3 training images show none of 2 classes .*\(cat, dog\).*data.num_train"):
        check_classes(np.array([0, 2, 2]), np.array([0, 1, 3]), CLASSES)


def test_a_run_refuses_such_a_probe(program):
    class OneClass(SortedByClass):
        def batch(self, indices):
            return super().batch(np.asarray(indices) // 4)

    config = tiny_config(mesh__data=1, eval__calibration_images=0, eval__batch_size=256)
    length = dataclasses.replace(program.length, total_steps=10**6)
    sources = OneClass(1024), SortedByClass(1024)
    context = EvaluationContext(config, dataclasses.replace(program, length=length), sources)
    state = program.factory.create(0, SortedByClass().batch(np.arange(16)))
    with pytest.raises(UserError, match=r"linear probe: .* 3 classes .*\(cat, deer, dog\)"):
        build_evaluators(context)["classification"].run(state, Moment(Stage.FINAL, 10**6, 1))
