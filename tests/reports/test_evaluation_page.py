"""The results of an evaluation: files, figures and pages from a record, with or without every protocol."""

import dataclasses
import sys

import numpy as np
import pytest

from jepa_jax.evals.evaluate import Evaluation, Examples
from jepa_jax.evals.features import Split
from jepa_jax.evals.neighbours import pca
from jepa_jax.reports.evaluation_page import (
    accuracy_bars,
    attention_picture,
    evaluation_markdown,
    evaluation_page,
    evaluation_table,
    leading_level,
    tsne,
    write_evaluation,
)
from jepa_jax.reports.page import render

RNG = np.random.default_rng(0)
CLASSES = ["<b>", "two"]
RESULTS = {
    "linear_probe": {
        "accuracy": 60.0, "top5_accuracy": None, "confusion": [[3, 1], [0, 4]], "interval_95": [51.2, 68.1],
        "chance": 50.0, "untrained": {"accuracy": 40.0}, "held_out_accuracy": 62.0,
    },
    "knn": {
        "accuracy": 55.0, "k": 5, "temperature": 0.1, "fixed_accuracy": 50.0, "interval_95": [45.0, 64.0],
        "fixed_interval_95": [41.0, 59.0], "chance": 50.0, "untrained": {"accuracy": 35.0, "fixed_accuracy": 33.0},
        "sweep": {"ks": [1, 5], "temperatures": [0.07, 0.1], "held_out_accuracy": [[10.0, 20.0], [30.0, 40.0]]},
    },
    "fine_tune": {
        "accuracy": 70.0, "epoch": 2, "epochs": 4, "start_accuracy": 60.0, "held_out_accuracies": [65, 72],
        "interval_95": [61.0, 78.0], "chance": 50.0,
    },
    "few_shot": {
        "ways": 2, "episodes": 100, "shots": {"5": {"accuracy": 80.0, "interval_95": 1.5}}, "chance": 50.0,
        "untrained": {"shots": {"5": {"accuracy": 66.6, "interval_95": 1.7}}},
    },
    "feature_quality": {
        "effective_rank": 3.0, "dimensions": 8, "rankme": 2.5, "collapse": "features are <nearly> constant",
        "spectrum": [3.0, 2.0, 1.0],
    },
}  # fmt: skip


def make_record(levels):
    return {
        "method": "image_jepa", "model": "<vit>", "data": "shapes", "weights": "target", "pool": "mean",
        "step": 1200,
        "classes": CLASSES, "train_images": 160, "test_images": 8, "choices_made_on": "a held-out tenth",
        "notes": ["The test images have <2> of 3 classes."], "levels": levels,
    }  # fmt: skip


@pytest.fixture
def evaluation(tmp_path):
    points = {0: Split(RNG.normal(size=(40, 8)), np.arange(40) % 2)}
    (tmp_path / "eval").mkdir()
    return Evaluation(tmp_path / "eval", make_record({"0": RESULTS}), [0], list(RESULTS), points)


def test_everything_is_written(evaluation):
    write_evaluation(evaluation)
    assert {path.name for path in evaluation.folder.iterdir()} == {
        "eval.md", "eval.html", "confusion_level0.svg", "knn_level0.svg", "scatter_level0.svg",
        "spectrum.svg",
    }  # fmt: skip
    page = (evaluation.folder / "eval.html").read_text()
    assert page.count("data:image/svg+xml") == 1  # scatter plots
    assert page.count('<svg class="map"') == 2  # confusion matrix; k-NN over k and temperature
    for text in (
        "+20.0 points over untrained", "80.0 %", "2-way, ± 1.5", "&lt;vit&gt;", "step 1,200", "EMA target",
        "features are &lt;nearly&gt; constant", ">Fine-tuning<", "70.0 % (61.0 to 78.0), epoch 2 of 4", "3.0 of 8",
        "The test images have &lt;2&gt; of 3 classes.",
    ):  # fmt: skip
        assert text in page, text


def test_maps_and_neighbours_stay_for_an_evaluation_that_adds_to_them(evaluation):
    pictures = RNG.integers(256, size=(12, 8, 8, 3), dtype=np.uint8)
    rows = {0: pictures.reshape(2, 6, 8, 8, 3)}
    write_evaluation(dataclasses.replace(evaluation, mapped=pictures, neighbours=rows))
    write_evaluation(dataclasses.replace(evaluation, points={}))  # of other protocols
    page = (evaluation.folder / "eval.html").read_text()
    assert page.count("--x:") % 12 == 0 and page.count("--x:") >= 12 and "Nearest neighbours" in page


def test_the_markdown_table_leaves_out_what_was_not_measured():
    text = evaluation_markdown(make_record({"0": RESULTS, "1": {"knn": RESULTS["knn"]}}))
    assert "|  | level 0 | level 1 |\n| --- | ---: | ---: |\n" in text
    assert (
        "| Linear probe, top-1 | 60.0 % (51.2 to 68.1) | – |" in text
        and "| k-NN, k and T chosen | 55.0 % (45.0 to 64.0), k 5, T 0.1 | 55.0" in text
    )
    assert "Note: The test images have <2> of 3 classes." in text
    assert "LiDAR" not in text and "Few-shot: 2 classes, 100 episodes" in text


def test_untrained_and_chance_stand_beside_every_accuracy():
    rows = dict(evaluation_table({"0": RESULTS}))
    bars = {bar.label: bar.value for bar in accuracy_bars(RESULTS)}
    expected = {
        "Linear probe, top-1, untrained": 40.0, "k-NN, k 20, T 0.07, untrained": 33.0,
        "k-NN, k and T chosen, untrained": 35.0, "Few-shot, 5 examples, untrained": 66.6, "Chance": 50.0,
        "Few-shot, chance": 50.0,
    }  # fmt: skip
    assert {label: rows[label] for label in expected} == {label: f"{value} %" for label, value in expected.items()}
    assert bars == {
        "Linear probe": 60.0, "Linear probe, untrained": 40.0, "k-NN": 50.0, "k-NN, untrained": 33.0,
        "k-NN, chosen": 55.0, "k-NN, chosen, untrained": 35.0, "Fine-tuned": 70.0, "Chance": 50.0, "Few-shot, 5": 80.0,
        "Few-shot, 5, untrained": 66.6, "Few-shot, chance": 50.0,
    }  # fmt: skip


def test_the_level_that_leads_is_chosen_on_held_out_images(tmp_path):
    # Better on test images, worse on held-out ones, and the reverse.
    lucky = {"linear_probe": {"accuracy": 65.0, "held_out_accuracy": 50.0}}
    better = {"linear_probe": {"accuracy": 55.0, "held_out_accuracy": 70.0}}
    assert leading_level({"0": RESULTS, "1": lucky}) == "0" and leading_level({"0": RESULTS, "1": better}) == "1"
    page = render(evaluation_page(make_record({"0": RESULTS, "1": better}), tmp_path / "eval"))
    assert "frozen encoder, level 1" in page and ">Level 0<" in page


@pytest.mark.slow
def test_an_evaluation_without_labels_has_a_page(tmp_path):
    record = make_record({"0": {"feature_quality": RESULTS["feature_quality"] | {"collapse": None}}}) | {"classes": []}
    points = {0: Split(RNG.normal(size=(40, 8)), np.zeros(40))}
    (tmp_path / "eval").mkdir()
    write_evaluation(Evaluation(tmp_path / "eval", record, [0], ["feature_quality"], points))
    page = (tmp_path / "eval" / "eval.html").read_text()
    assert "No accuracy was measured." in page and "Features of test images" in page and "Collapsed" not in page


def test_attention_is_drawn_beside_the_image_and_its_patches(evaluation):
    attention = np.zeros((2, 3, 4, 4))
    attention[0, 1, 2, 3] = 0.25  # the largest weight of its map: white
    images = RNG.integers(0, 256, (2, 16, 16, 3), np.uint8)
    examples = Examples(images, RNG.normal(size=(2, 4, 4, 5)), attention)
    picture = attention_picture(examples)
    assert picture.shape == (2 * 100 + 4, 5 * 100 + 4, 3)  # tiles of 96 pixels and 4 between them
    (head,) = np.argwhere(picture[4:100, 304:400, 0].reshape(4, 24, 4, 24).mean(axis=(1, 3)) == 255)
    assert head.tolist() == [2, 3] and picture[4:100, 204:300].max() == 0
    np.testing.assert_array_equal(picture[4:100:6, 4:100:6], images[0])
    write_evaluation(dataclasses.replace(evaluation, examples=examples))
    assert "attention of the last block" in (evaluation.folder / "eval.html").read_text()


def test_pca_finds_the_axes_of_an_ellipse():
    x = RNG.normal(size=(3000, 3)) * (3, 1, 0.01)
    points, shares = pca(x)
    assert shares == pytest.approx([0.9, 0.1], abs=0.01)
    assert abs(np.corrcoef(points[:, 0], x[:, 0])[0, 1]) > 0.999


def test_tsne_keeps_clusters_together():
    labels = np.repeat(np.arange(4), 30)
    x = 8 * RNG.normal(size=(4, 20))[labels] + RNG.normal(size=(120, 20))
    y = tsne(x)
    distance = np.linalg.norm(y[:, None] - y[None], axis=-1)
    np.fill_diagonal(distance, np.inf)
    assert np.mean(labels[np.argmin(distance, axis=1)] == labels) == 1
    assert np.isfinite(y).all()


def test_without_scikit_learn_there_is_no_tsne(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    assert tsne(RNG.normal(size=(12, 3))) is None
