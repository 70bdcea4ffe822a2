"""What is found in the rows of a study."""

import dataclasses

from jepa_jax.studies.findings import find_best_lr, find_tradeoff
from jepa_jax.studies.rows import StudyRow


def lr_rows(accuracies):
    return [
        StudyRow(f"{lr}_{seed}", lr, 5, seed, "diverged" if accuracy is None else "finished", probe_accuracy=accuracy)
        for lr, several in accuracies.items()
        for seed, accuracy in enumerate(several)
    ]


def test_best_rate_its_noise_and_its_place_in_the_range():
    found = find_best_lr(lr_rows({0.1: [50, 51], 0.3: [59, 61], 0.5: [60, 59], 1.0: [None, 70]}))
    # Pooled variance (.5 + 2 + .5) / 3 = 1, so two standard errors are 2: 59.5 is within noise of 60, 50.5 is not.
    facts = found.facts
    assert facts["best_lr"] == 0.3 and facts["probe_accuracy"] == 60 and not facts["at_edge"]
    assert facts["within_noise"] == [0.5] and facts["seed_std"] == 1.0
    assert (facts["runs"], facts["finished"]) == (8, 7)
    assert "1: 1 of 2 runs did not finish." in found.sentences  # the 70 % of a rate that diverged on the other seed


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


def test_without_a_finished_run_there_is_no_best_rate():
    found = find_best_lr(lr_rows({0.1: [None]}))
    assert found.facts["best_lr"] is None and "no best learning rate" in found.sentences[0]


def test_times_that_cannot_be_right_are_flagged():
    rows = [
        StudyRow(f"e{epochs}", None, epochs, 0, "finished", probe_accuracy=50 + epochs, wall_seconds=seconds)
        for epochs, seconds in [(5, 10.0), (10, 21.0), (20, 39.0), (40, 30.0)]
    ]
    found = find_tradeoff(rows)
    assert found.facts["flagged"] == ["e40"] and found.facts["time_grows"] is False
    assert "5 to 10 epochs: +5.00 points for +11 s." in found.sentences
    good = find_tradeoff(rows[:3]).facts
    assert good["flagged"] == [] and good["time_grows"] is True


def test_a_row_keeps_its_form_on_disk():
    row = StudyRow("epochs5_seed1", None, 5, 1, "finished", steps=7)
    assert list(row.to_dict()) == [
        "name", "epochs", "seed", "status", "reason", "exit_code", "attempts", "attempt_seconds", "probe_accuracy",
        "untrained_probe_accuracy", "knn_accuracy", "wall_seconds", "cpu_seconds", "steps", "final_loss",
    ]  # fmt: skip
    assert StudyRow.from_dict(row.to_dict() | {"of_a_newer_version": 1}) == row
    assert dataclasses.replace(row, lr=0.1).to_dict()["lr"] == 0.1
