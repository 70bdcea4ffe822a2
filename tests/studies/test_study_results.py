"""What is concluded from the rows of a study."""

from jepa_jax.studies import study_results


def lr_rows(accuracies):
    return [
        {"name": f"{lr}_{seed}", "lr": lr, "epochs": 5, "seed": seed, "probe_accuracy": accuracy, "wall_seconds": 1.0,
         "status": "diverged" if accuracy is None else "finished", "reason": "", "attempt_seconds": 1.0}
        for lr, several in accuracies.items() for seed, accuracy in enumerate(several)
    ]  # fmt: skip


def test_best_rate_its_noise_and_its_place_in_the_range():
    result, words = study_results.conclude_lr(lr_rows({0.1: [50, 51], 0.3: [59, 61], 0.5: [60, 59], 1.0: [None, 70]}))
    # Pooled variance (.5 + 2 + .5) / 3 = 1, so two standard errors are 2: 59.5 is within noise of 60, 50.5 is not.
    assert result["best_lr"] == 0.3 and result["probe_accuracy"] == 60 and not result["at_edge"]
    assert result["within_noise"] == [0.5] and result["seed_std"] == 1.0
    assert (result["runs"], result["finished"]) == (8, 7)
    assert "1: 1 of 2 runs did not finish." in words  # the 70 % of a rate that diverged on the other seed


def test_best_rate_at_the_edge_is_said():
    result, words = study_results.conclude_lr(lr_rows({0.1: [50], 0.3: [60]}))
    assert result["at_edge"] and result["within_noise"] == []
    assert any("largest rate tried" in word for word in words) and any("noise is unknown" in word for word in words)
    # A larger rate that diverged was tried: the best is inside. One that was killed tells nothing.
    rows = lr_rows({0.1: [50], 0.3: [60], 1.0: [None]})
    assert not study_results.conclude_lr(rows)[0]["at_edge"]
    rows[-1]["status"] = "killed"
    assert study_results.conclude_lr(rows)[0]["at_edge"]


def test_no_finished_run_has_no_best():
    result, words = study_results.conclude_lr(lr_rows({0.1: [None]}))
    assert result["best_lr"] is None and "no best learning rate" in words[0]


def test_times_that_cannot_be_right_are_flagged():
    rows = [
        {"name": f"e{epochs}", "epochs": epochs, "seed": 0, "status": "finished", "probe_accuracy": 50 + epochs,
         "wall_seconds": seconds}
        for epochs, seconds in [(5, 10.0), (10, 21.0), (20, 39.0), (40, 30.0)]
    ]  # fmt: skip
    result, words = study_results.conclude_epochs(rows)
    assert result["flagged"] == ["e40"] and result["time_grows"] is False
    assert "5 to 10 epochs: +5.00 points for +11 s." in words
    good, _ = study_results.conclude_epochs(rows[:3])
    assert good["flagged"] == [] and good["time_grows"] is True
