"""The results of a study: table, page and plot of its rows."""

import dataclasses
import pathlib

import pytest

from jepa_jax.experiments.findings import find, group_rows
from jepa_jax.experiments.rows import StudyRow
from jepa_jax.experiments.study import Study
from jepa_jax.reports.page import render
from jepa_jax.reports.study_page import (
    means,
    study_charts,
    study_markdown,
    study_page,
    study_table,
    write_plot,
    write_tables,
)


def make_rows():
    rows = [
        StudyRow(
            f"lr{lr}_{seed}",
            lr,
            5,
            seed,
            "finished",
            probe_held_out_accuracy=60 + 10 * lr + seed,
            untrained_probe_held_out_accuracy=30.0,
            probe_accuracy=90 - 10 * lr,
        )  # fmt: skip
        for lr in (0.1, 0.3)
        for seed in (0, 1)
    ]
    return [*rows, StudyRow("lr20", 20.0, 5, 0, "diverged", reason="lr = 20 | too <large>")]


def make_study(folder: pathlib.Path) -> Study:
    return Study("lr_search", "<config>.py", folder, ("train",), ("--config.model.width=8",))


def test_columns_that_no_run_fills_are_left_out():
    header, cells = study_table(make_rows())
    assert header == ["lr", "epochs", "seed", "status", "held-out %", "untrained held-out %", "test %", "reason"]
    assert cells[0] == ["0.1", "5", "0", "finished", "61.00", "30.00", "89.00", ""]
    assert cells[-1] == ["20", "5", "0", "diverged", "", "", "", "lr = 20 | too <large>"]


def test_charts_have_a_tick_at_every_rate_and_intervals_of_the_seeds():
    probe, _ = study_charts("lr_search", make_rows())
    (chart,) = probe.parts
    assert [text for _, text in chart.x_ticks] == ["0.1", "0.3", "20"]
    assert all(0 <= place <= 100 for place, _ in chart.x_ticks)  # also the rate that diverged
    assert len(chart.bad_marks) == 1
    # Two rates with two seeds 1 apart: pooled variance .5, 2 degrees of freedom, t = 4.303.
    _, means_, half_widths = means(group_rows(make_rows(), "lr"), "probe_held_out_accuracy")
    assert means_[:2] == [61.5, 63.5] and half_widths[:2] == pytest.approx([4.3027 * 0.5] * 2, rel=1e-4)
    assert sum(style == "interval" for style, _, _ in chart.layers[0].paths) == 2
    losses = [dataclasses.replace(row, final_loss=row.lr + row.seed) for row in make_rows()]
    (loss,) = study_charts("lr_search", losses)[1].parts  # losses of different rates have no common variance
    assert not any(style == "interval" for style, _, _ in loss.layers[0].paths)


def test_without_seeds_there_are_no_intervals():
    probe, _ = study_charts("lr_search", [row for row in make_rows() if row.seed == 0])
    assert not any(style == "interval" for style, _, _ in probe.parts[0].layers[0].paths)


def test_everything_is_written(tmp_path):
    study, rows = make_study(tmp_path), make_rows()
    findings = find(study.kind, rows)
    write_tables(study, rows, findings)
    write_plot(study, rows)
    page, text = (tmp_path / "study.html").read_text(), (tmp_path / "results.md").read_text()
    for fact in ("Best learning rate: 0.3", "each seed", "untrained 30.0 %", "too &lt;large&gt;", "&lt;config&gt;.py"):
        assert fact in page, fact
    assert page.count('<tr class="marked">') == 2  # both runs at the best rate
    assert "| lr = 20 \\| too <large> |" in text and "- Best learning rate: 0.3" in text
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_a_study_without_a_result_has_a_page(tmp_path):
    study, rows = make_study(tmp_path), make_rows()[-1:]
    findings = find(study.kind, rows)
    assert "there is no best learning rate" in render(study_page(study, rows, findings))
    assert "diverged" in study_markdown(study, rows, findings)
