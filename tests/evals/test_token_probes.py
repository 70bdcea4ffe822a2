"""Probes of patches and of several layers, and evaluation on another data set than that of the run."""

import json

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.data.sources import open_source
from jepa_jax.evals.evaluate import evaluate
from jepa_jax.evals.evaluators import Limits
from jepa_jax.evals.inference import load_run
from jepa_jax.evals.token_probes import Task, accuracy, attentive_logits, counts, linear_head, map_logits, mean_iou
from jepa_jax.reports.evaluation_page import evaluation_text
from tests.evals.untrained_run import quiet, write_run
from tests.tiny import tiny_config

VIT = {"model__name": "vit", "model__width": 16, "model__depth": 2, "model__heads": 2, "model__patch_size": 4}


def write_maps(folder, count=80, size=16):
    """Writes images of one colour per half, and which half shows which of three colours; a corner is unknown."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 3, (count, 2))
    maps = np.repeat(np.repeat(kinds[:, None, :], size, axis=1), size // 2, axis=2)
    colours = np.array([[250, 20, 20], [20, 250, 20], [20, 20, 250]])
    images = (colours[maps] + rng.integers(-15, 6, (count, size, size, 3))).clip(0, 255).astype(np.uint8)
    maps[:, :4, :4] = 255
    for name, part in (("train", slice(20, None)), ("test", slice(20))):
        np.savez(folder / f"{name}.npz", images=images[part], labels=maps[part])


def test_mean_iou_and_accuracy_of_known_pixels():
    truth, predicted = np.array([0, 0, 1, 1, 255]), np.array([0, 1, 1, 1, 0])
    maps = Task("map", 4, linear_head, map_logits, unknown=255)
    confusion = counts(truth, predicted, maps)
    assert counts(truth[-1:], predicted[-1:], maps._replace(classes=300, unknown=-1))[255, 0] == 1  # a label
    assert confusion.sum() == 4 and accuracy(confusion) == 75
    assert mean_iou(confusion) == pytest.approx(100 * (1 / 2 + 2 / 3) / 2)  # classes 2 and 3 are nowhere
    assert mean_iou(np.diag([3, 0, 5])) == 100 and mean_iou(np.zeros((2, 2), int)) == 0


def test_attentive_pooling_equals_its_formula():
    rng = np.random.default_rng(1)
    tokens = rng.normal(size=(3, 2, 2, 8))
    head = {name: rng.normal(size=(8, 8)) for name in ("keys", "values")}
    head |= {"query": rng.normal(size=8), "kernel": rng.normal(size=(8, 5)), "bias": rng.normal(size=5)}
    read = np.zeros((3, 8))
    for image in range(3):
        x = tokens[image].reshape(4, 8)
        for part in np.split(np.arange(8), 4):
            scores = np.exp((x @ head["keys"])[:, part] @ head["query"][part] / np.sqrt(2))
            read[image, part] = scores / scores.sum() @ (x @ head["values"])[:, part]
    found = attentive_logits({k: v.astype(np.float32) for k, v in head.items()}, tokens.astype(np.float32), ())
    np.testing.assert_allclose(found, read @ head["kernel"] + head["bias"], rtol=1e-4, atol=1e-5)


def test_logits_of_patches_are_resized_bilinearly():
    head = {"kernel": np.eye(1, dtype=np.float32), "bias": np.zeros(1, np.float32)}
    tokens = np.float32([0, 4]).reshape(1, 1, 2, 1)
    np.testing.assert_allclose(map_logits(head, tokens, (1, 1, 8))[0, 0, :, 0], [0, 0, 0.5, 1.5, 2.5, 3.5, 4, 4])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probes") / "run"
    write_run(tiny_config(data__num_train=80, data__num_test=40, **VIT), folder)
    return folder


def test_labels_are_probed_on_patches_and_on_layers(run):
    names = ("last_layers", "attentive_probe")
    record = evaluate(run, protocols=",".join(names), limits=Limits(untrained=False), console=quiet()).record
    found = record["levels"]["0"]
    assert list(found) == list(names) and json.dumps(found)
    for one in found.values():
        low, high = one["interval_95"]
        assert low <= one["accuracy"] <= high and one["chance"] >= 10 and one["test_images"] == 40
    assert found["last_layers"]["features"] == 2 * 16  # both blocks
    assert found["attentive_probe"]["fitted_images"] == 72
    encoder = load_run(run).encoder
    train, _ = encoder.layer_features(1)
    np.testing.assert_allclose(train.features, encoder.train_features().features, rtol=1e-4, atol=1e-5)
    both, _ = encoder.layer_features(2)
    np.testing.assert_allclose(both.features[:, 16:], train.features, rtol=1e-4, atol=1e-5)


def test_maps_of_another_data_set_are_segmented_beside_the_untrained_encoder(run, tmp_path):
    """Colours can be read off patches linearly, so that halves are found with any encoder."""
    write_maps(tmp_path)
    evaluation = evaluate(
        run, data_source="npz", data_dir=str(tmp_path), protocols="segmentation_probe", console=quiet()
    )
    assert evaluation.folder == run / "eval_npz" and (run / "eval_npz" / "eval.json").exists()
    found = evaluation.record["levels"]["0"]["segmentation_probe"]
    assert found["classes"] == 3 and found["miou"] > 60 > 25 > found["chance"] > 5
    assert found["untrained"]["miou"] > 60 and found["pixel_accuracy"] > 75
    text = evaluation_text(evaluation.record)
    assert "Segmentation probe, mIoU, untrained" in text and "the encoder was trained on shapes" in text
    with pytest.raises(UserError, match="attentive_probe needs labels, which the data has not; use segmentation_probe"):
        evaluate(run, data_source="npz", data_dir=str(tmp_path), protocols="attentive_probe", console=quiet())


def test_an_encoder_without_patches_is_refused(tmp_path):
    write_run(tiny_config(model__name="resnet10", model__width=4), tmp_path / "run")
    with pytest.raises(UserError, match="attentive_probe needs patches, which the encoder has not"):
        evaluate(tmp_path / "run", protocols="attentive_probe", console=quiet())


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.zeros((5, 12, 11), int), r"labels are int64 \(5, 12, 11\) for images \(5, 12, 12, 3\)"),
        (np.full((5, 12, 12), 300), "maps hold a class from 0 to 254"),
        (np.zeros((5, 12, 12)), "labels are float64"),
    ],
)
def test_maps_that_do_not_fit_are_refused(tmp_path, labels, said):
    np.savez(tmp_path / "train.npz", images=np.zeros((5, 12, 12, 3), np.uint8), labels=labels)
    data = dict(data__source="npz", data__dir=str(tmp_path), data__num_train=0, data__num_test=0)
    with pytest.raises(UserError, match=said):
        open_source(tiny_config(data__image_size=12, **data).data, "train")
    np.savez(tmp_path / "train.npz", images=np.zeros((5, 12, 12, 3), np.uint8), labels=np.zeros((5, 12, 12), int))
    with pytest.raises(UserError, match="maps of 12 x 12 for data.image_size = 16"):
        open_source(tiny_config(**data).data, "train")
