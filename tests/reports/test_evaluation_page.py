"""The results of an evaluation: files, figures and pages from a record, with or without every protocol."""

import json

import numpy as np
import pytest

from jepa_jax.evals.evaluate import Evaluation
from jepa_jax.evals.features import Split
from jepa_jax.reports.evaluation_page import evaluation_markdown, evaluation_page, write_evaluation
from jepa_jax.reports.page import render

RNG = np.random.default_rng(0)
CLASSES = ["<b>", "two"]
RESULTS = {
    "linear_probe": {"accuracy": 60.0, "top5_accuracy": None, "confusion": [[3, 1], [0, 4]]},
    "knn": {
        "accuracy": 55.0, "k": 5, "temperature": 0.1, "fixed_accuracy": 50.0,
        "sweep": {"ks": [1, 5], "temperatures": [0.07, 0.1], "held_out_accuracy": [[10.0, 20.0], [30.0, 40.0]]},
    },
    "fine_tune": {"accuracy": 70.0, "epoch": 2, "epochs": 4, "start_accuracy": 60.0, "held_out_accuracies": [65, 72]},
    "few_shot": {"ways": 2, "episodes": 100, "shots": {"5": {"accuracy": 80.0, "interval_95": 1.5}}},
    "feature_quality": {
        "effective_rank": 3.0, "dimensions": 8, "rankme": 2.5, "collapse": "features are <nearly> constant",
        "spectrum": [3.0, 2.0, 1.0],
    },
}  # fmt: skip


def make_record(levels):
    return {
        "method": "image_jepa", "model": "<vit>", "data": "shapes", "weights": "target", "step": 1200,
        "classes": CLASSES, "train_images": 160, "test_images": 8, "choices_made_on": "a held-out tenth",
        "levels": levels,
    }  # fmt: skip


@pytest.fixture
def evaluation(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"untrained_probe_accuracy": 40.0}))
    points = {0: Split(RNG.normal(size=(40, 8)), np.arange(40) % 2)}
    images = RNG.integers(0, 255, (2, 8, 8, 3), dtype=np.uint8)
    patches = images, RNG.normal(size=(2, 4, 4, 6))
    (tmp_path / "eval").mkdir()
    return Evaluation(
        tmp_path / "eval", make_record({"0": RESULTS}), [0], list(RESULTS), False, points, patches=patches
    )


def test_everything_is_written_and_figures_of_another_checkpoint_are_removed(evaluation):
    (evaluation.folder / "scatter_level7.png").write_text("of an earlier checkpoint")
    write_evaluation(evaluation)
    assert {path.name for path in evaluation.folder.iterdir()} == {
        "eval.json", "eval.md", "eval.html", "confusion_level0.png", "knn_level0.png", "scatter_level0.png",
        "spectrum.png", "patches.png",
    }  # fmt: skip
    assert json.loads((evaluation.folder / "eval.json").read_text()) == evaluation.record
    page = (evaluation.folder / "eval.html").read_text()
    assert page.count("data:image/png") == 4
    for text in (
        "+20.0 points over untrained", "80.0 %", "2-way, ± 1.5", "&lt;vit&gt;", "step 1,200", "EMA target",
        "features are &lt;nearly&gt; constant", ">Fine-tuning<", "70.0 % (epoch 2 of 4)", "3.0 of 8",
    ):  # fmt: skip
        assert text in page, text


def test_the_markdown_table_leaves_out_what_was_not_measured():
    text = evaluation_markdown(make_record({"0": RESULTS, "1": {"knn": RESULTS["knn"]}}))
    assert "|  | level 0 | level 1 |\n| --- | ---: | ---: |\n" in text
    assert (
        "| Linear probe, top-1 | 60.0 % | – |" in text and "| k-NN, k and T chosen | 55.0 % (k 5, T 0.1) | 55.0" in text
    )
    assert "LiDAR" not in text and "Few-shot: 2 classes, 100 episodes" in text


def test_levels_have_sections_of_their_own_and_the_best_leads(tmp_path):
    better = {"linear_probe": {"accuracy": 65.0}}
    page = render(evaluation_page(make_record({"0": RESULTS, "1": better}), tmp_path / "eval"))
    assert "frozen encoder, level 1" in page and ">Level 0<" in page


def test_an_evaluation_without_labels_has_a_page(tmp_path):
    record = make_record({"0": {"feature_quality": RESULTS["feature_quality"] | {"collapse": None}}}) | {"classes": []}
    points = {0: Split(RNG.normal(size=(40, 8)), np.zeros(40))}
    write_evaluation(Evaluation(tmp_path / "eval", record, [0], ["feature_quality"], True, points, patches=None))
    page = (tmp_path / "eval" / "eval.html").read_text()
    assert "No accuracy was measured." in page and "Features of test images" in page and "Collapsed" not in page
