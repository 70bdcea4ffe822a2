"""What is found in the rows of a study."""

import dataclasses

import pytest

import jepa_jax
from jepa_jax.experiments.findings import find_best_lr, find_tradeoff
from jepa_jax.experiments.rows import StudyRow


def lr_rows(held_out, test=None):
    """Returns rows of rates with held-out accuracies per seed (None: diverged); `test` are their test accuracies."""
    return [
        StudyRow(
            f"{lr}_{seed}", lr, 5, seed, "diverged" if accuracy is None else "finished",
            probe_held_out_accuracy=accuracy, probe_accuracy=accuracy if test is None else test[lr][seed],
        )
        for lr, several in held_out.items()
        for seed, accuracy in enumerate(several)
    ]  # fmt: skip


def test_a_rate_is_chosen_on_held_out_images_where_the_test_images_disagree():
    found = find_best_lr(
        lr_rows({0.1: [50, 51], 0.3: [60, 61], 0.5: [40, 41]}, {0.1: [70, 70], 0.3: [54, 56], 0.5: [90, 90]})
    )
    assert found.facts["best_lr"] == 0.3 and found.facts["chosen_by"] == jepa_jax.SELECTION_KEY
    assert found.facts["probe_held_out_accuracy"] == 60.5 and found.facts["probe_accuracy"] == 55
    assert found.sentences[0] == (
        "Best learning rate: 0.3, 60.50 % of held-out train images (mean of 2); test accuracy 55.00 %."
    )
    assert "90" not in " ".join(found.sentences)


def test_best_rate_its_noise_and_its_place_in_the_range():
    found = find_best_lr(lr_rows({0.1: [50, 51], 0.3: [59, 61], 0.5: [60, 59], 1.0: [None, 70]}))
    # Pooled variance (.5 + 2 + .5) / 3 = 1, 3 degrees of freedom, t = 3.18: 59.5 is within noise of 60, 50.5 is not.
    facts = found.facts
    assert facts["best_lr"] == 0.3 and facts["probe_held_out_accuracy"] == 60 and not facts["at_edge"]
    assert facts["within_noise"] == [0.5] and facts["seed_std"] == 1.0 and facts["degrees_of_freedom"] == 3
    assert (facts["runs"], facts["finished"]) == (8, 7)
    assert "1: 1 of 2 runs did not finish." in found.sentences  # the 70 % of a rate that diverged on the other seed


@pytest.mark.parametrize("gap, is_within", [(2.9, True), (3.1, True), (3.3, False)])
def test_noise_is_that_of_students_t_with_the_real_degrees_of_freedom(gap, is_within):
    # Pooled variance 1 with 3 degrees of freedom: t = 3.182 and the standard error of a difference of two means of 2
    # seeds is 1. Two standard errors would have called 2.9 and 3.1 real.
    low = 60 - gap
    rows = lr_rows({0.1: [low - 0.5**0.5, low + 0.5**0.5], 0.3: [59, 61], 0.5: [30, 30]})
    rows += lr_rows({0.6: [0.0]})  # one seed adds no degree of freedom
    # (1 + 2 + 0) / 3 = 1
    found = find_best_lr(rows)
    assert found.facts["degrees_of_freedom"] == 3 and found.facts["seed_std"] == 1.0
    assert (0.1 in found.facts["within_noise"]) is is_within
    assert "t with 3 degrees of freedom" in " ".join(found.sentences)


def test_best_rate_at_the_edge_is_reported():
    found = find_best_lr(lr_rows({0.1: [50], 0.3: [60]}))
    assert found.facts["at_edge"] and found.facts["within_noise"] == []
    text = " ".join(found.sentences)
    assert "largest rate tried" in text and "noise is unknown" in text
    # A larger rate that diverged was tried, so the best is inside. One that was killed says nothing.
    rows = lr_rows({0.1: [50], 0.3: [60], 1.0: [None]})
    assert not find_best_lr(rows).facts["at_edge"]
    rows[-1] = dataclasses.replace(rows[-1], status="killed")
    assert find_best_lr(rows).facts["at_edge"]


def test_without_labels_the_lowest_validation_loss_is_best():
    losses = {0.1: [0.52, 0.50], 0.3: [0.31, 0.33], 0.5: [0.9, 0.8]}
    rows = [
        StudyRow(f"{lr}_{seed}", lr, 5, seed, "finished", validation_loss=loss, wall_seconds=5.0)
        for lr, several in losses.items()
        for seed, loss in enumerate(several)
    ]
    found = find_best_lr(rows)
    assert found.facts["best_lr"] == 0.3 and found.facts["chosen_by"] == "validation_loss"
    assert found.sentences[0] == "Best learning rate: 0.3, validation loss 0.32 (mean of 2)."
    points = find_tradeoff(rows).facts["points"]
    assert list(points[0]) == ["epochs", "validation_loss", "wall_seconds"]


def test_without_a_finished_run_there_is_no_best_rate():
    found = find_best_lr(lr_rows({0.1: [None]}))
    assert found.facts["best_lr"] is None and "no best learning rate" in found.sentences[0]


def test_times_that_cannot_be_right_are_flagged():
    rows = [
        StudyRow(
            f"e{epochs}",
            None,
            epochs,
            0,
            "finished",
            probe_held_out_accuracy=50 + epochs,
            probe_accuracy=90 - epochs,
            wall_seconds=seconds,
        )  # fmt: skip
        for epochs, seconds in [(5, 10.0), (10, 21.0), (20, 39.0), (40, 30.0)]
    ]
    found = find_tradeoff(rows)
    assert found.facts["flagged"] == ["e40"] and found.facts["time_grows"] is False
    assert "5 to 10 epochs: +5.00 points for +11 s." in found.sentences
    assert found.facts["points"][0] == {
        "epochs": 5, "probe_held_out_accuracy": 55, "probe_accuracy": 85, "wall_seconds": 10.0
    }  # fmt: skip
    good = find_tradeoff(rows[:3]).facts
    assert good["flagged"] == [] and good["time_grows"] is True


def test_a_row_keeps_its_form_on_disk():
    row = StudyRow("epochs5_seed1", None, 5, 1, "finished", steps=7)
    assert list(row.to_dict()) == [
        "name", "epochs", "seed", "status", "reason", "exit_code", "attempts", "attempt_seconds",
        "probe_held_out_accuracy", "untrained_probe_held_out_accuracy", "probe_accuracy", "untrained_probe_accuracy",
        "knn_accuracy", "validation_loss", "wall_seconds", "cpu_seconds", "steps", "final_loss",
    ]  # fmt: skip
    assert StudyRow.from_dict(row.to_dict() | {"of_a_newer_version": 1}) == row
    assert dataclasses.replace(row, lr=0.1).to_dict()["lr"] == 0.1
