"""Pages and tables of sweeps and studies: what was measured is there, what was not says why."""

import dataclasses
import json
import pathlib
import re

import pytest

from jepa_jax.experiments.findings import find_in_rows, group_rows
from jepa_jax.experiments.rows import StudyRow
from jepa_jax.experiments.study import Study
from jepa_jax.reports.experiment_page import (
    STUDY_COLUMNS,
    means_and_intervals,
    study_charts,
    study_markdown,
    study_page,
    sweep_markdown,
    sweep_page,
    write_study,
    write_sweep,
)
from jepa_jax.reports.page import render
from jepa_jax.reports.tables import table_cells

GIB = 2**30
ROOT = pathlib.Path(__file__).parents[2]


def make_row(speed, **values):
    combination = {
        "batch_size": 64, "num_workers": 0, "grad_accum_steps": 1, "precision": "float32", "remat": "none",
        "pipeline": "grain",
    }  # fmt: skip
    combination |= {key: values.pop(key) for key in list(values) if key in combination}
    figures = {"status": "out_of_memory"}
    if speed:
        interval = [0.98 * speed, 1.02 * speed]
        figures = {
            "status": "ok", "samples_per_sec": speed, "samples_per_sec_ci95": interval, "step_time_p50": 0.064,
            "data_wait_fraction": 0.02,
        }  # fmt: skip
    return {"combination": combination, **figures, **values}


@pytest.fixture
def document():
    rows = [
        make_row(100.0, peak_memory_bytes=2 * GIB),
        make_row(150.9, batch_size=128, num_workers=2, peak_memory_bytes=4 * GIB),
        make_row(91.0, batch_size=128, precision="bfloat16", peak_memory_bytes=3 * GIB, leak=True,
                 memory_slope_bytes_per_step=2**20),
        make_row(None, batch_size=256, reason="needs <12> GiB | more"),
    ]  # fmt: skip
    header = {
        "command": "python scripts/profile_throughput.py --x=<y>", "created": "2025-01-02", "config_name": "<tiny>",
        "hardware": {"cpu": "A processor", "cores": 2, "ram_bytes": 8 * GIB}, "versions": {"jax": "0.1"},
        "memory_limit_bytes": 8 * GIB, "max_batches": 8, "warmup_batches": 2, "repeats": 3, "config_hash": "abc",
    }  # fmt: skip
    entry = {"from": 64, "to": 128, "ratio": 1.5, "interval": [1.4, 1.6], "effect": "effect"}
    conclusion = {
        "best": rows[1]["combination"], "gain": {"ratio": 1.509, "interval": [1.4, 1.6]}, "noise_percent": 1.0,
        "text": ["Use batch 128.", "Batch matters.", "Another <sentence>."],
        "knobs": [{"knob": "batch_size", "text": "Batch matters.", "comparisons": [entry]}],
    }  # fmt: skip
    return {"header": header, "rows": rows, "conclusion": conclusion}


def test_the_page_holds_the_choice_the_failures_and_the_provenance(document):
    page = render(sweep_page(document))
    for text in ("Use batch 128.", "Another &lt;sentence&gt;.", "1.51 x", "3 of 4 measured", "limit 8.0 GiB",
                 "needs &lt;12&gt; GiB | more", "by 1.00 MiB per step", "--x=&lt;y&gt;", "A processor", "8.00 GiB",
                 "Throughput sweep of &lt;tiny&gt;", "1.400 to 1.600"):  # fmt: skip
        assert text in page, text
    assert "Batch matters." not in page  # the table of settings says it
    assert page.count('class="chart"') == 3
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_an_interval_that_contains_1_is_no_gain_on_the_page(document):
    document["conclusion"] |= {
        "best": document["rows"][0]["combination"], "gain": None, "verdict": "nothing shown: keep the config",
        "not_shown": {"combination": document["rows"][1]["combination"], "ratio": 2.52, "interval": [0.686, 9.253]},
        "text": ["No significant speed-up: keep the config as given."],
    }  # fmt: skip
    page = render(sweep_page(document))
    assert "none shown" in page and "keep the config; the fastest other: 2.52 (0.69 to 9.25) x" in page
    assert "2.52 x" not in page  # not as a headline
    assert re.search(r'<tr class="marked"><td data-v="64"', page)  # the config is what the page recommends


def test_every_row_is_in_the_sortable_table_and_the_choice_is_marked(document):
    page = render(sweep_page(document))
    table = page[page.index('class="sortable"') :]
    body = table[table.index("<tbody>") : table.index("</tbody>")]
    assert body.count("<tr") == 4
    assert re.search(r'<tr class="marked"><td data-v="128"', body)
    assert 'data-v="150.9"' in body  # sorted by the number, not by its text
    assert body.count('class="bad"') == 2


def test_a_sweep_without_results_has_a_page_too(document):
    rows = [row | {"status": "pending", "samples_per_sec": None} for row in document["rows"]]
    page = render(sweep_page(document | {"rows": rows, "conclusion": {}}))
    assert "No combination was measured." in page and "Nothing was concluded yet." in page
    assert render(sweep_page({"header": {}, "rows": [], "conclusion": {}}))


def test_the_recorded_sweep_has_a_page():
    recorded = json.loads((ROOT / "profiling" / "results" / "cpu.json").read_text())
    page = render(sweep_page(recorded))
    assert recorded["conclusion"]["text"][0] in page and "No combination was measured." not in page


def test_the_markdown_table_has_a_line_per_row_the_fastest_first(document):
    header, rule, *lines = sweep_markdown(document["rows"]).splitlines()
    assert len(lines) == 4 and header.count("|") == rule.count("|") == lines[0].count("|")
    assert lines[0].startswith("| 128 | 2 | 1 | float32") and "150.9" in lines[0]
    assert lines[-1].endswith("out of memory: needs <12> GiB \\| more |")
    assert "GPU" not in header  # no row has that figure


def test_page_and_table_lie_beside_the_results(document, tmp_path):
    table = write_sweep(document, tmp_path / "sweep.json")
    assert (tmp_path / "sweep.md").read_text() == table
    assert "Use batch 128." in (tmp_path / "sweep.html").read_text()


def study_rows():
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
    cells = table_cells(study_rows(), STUDY_COLUMNS)
    rows = [[cell.text for cell in row] for row in zip(*cells.values(), strict=True)]
    assert list(cells) == ["lr", "epochs", "seed", "status", "held-out %", "untrained held-out %", "test %", "reason"]
    assert rows[0] == ["0.1", "5", "0", "finished", "61.00", "30.00", "89.00", ""]
    assert rows[-1] == ["20", "5", "0", "diverged", "–", "–", "–", "lr = 20 | too <large>"]


def test_charts_have_a_tick_at_every_rate_and_intervals_of_the_seeds():
    probe, _ = study_charts("lr_search", study_rows())
    (chart,) = probe.parts
    assert [text for _, text in chart.x_ticks] == ["0.1", "0.3", "20"]
    assert all(0 <= place <= 100 for place, _ in chart.x_ticks)  # also the rate that diverged
    assert len(chart.bad_marks) == 1
    # Two rates with two seeds 1 apart: pooled variance .5, 2 degrees of freedom, t = 4.303.
    means, intervals = means_and_intervals(group_rows(study_rows(), "lr"), "probe_held_out_accuracy")
    assert means[:2] == [61.5, 63.5] and intervals[0] == pytest.approx((61.5 - 2.15135, 61.5 + 2.15135), rel=1e-4)
    assert sum(style == "interval" for style, _, _ in chart.layers[0].paths) == 2
    losses = [dataclasses.replace(row, final_loss=row.lr + row.seed) for row in study_rows()]
    (loss,) = study_charts("lr_search", losses)[1].parts  # losses of different rates have no common variance
    assert not any(style == "interval" for style, _, _ in loss.layers[0].paths)


def test_without_seeds_there_are_no_intervals():
    probe, _ = study_charts("lr_search", [row for row in study_rows() if row.seed == 0])
    assert not any(style == "interval" for style, _, _ in probe.parts[0].layers[0].paths)


def test_everything_is_written(tmp_path):
    study, rows = make_study(tmp_path), study_rows()
    findings = find_in_rows(study.kind, rows)
    write_study(study, rows, findings)
    page, text = (tmp_path / "study.html").read_text(), (tmp_path / "results.md").read_text()
    for fact in ("Best learning rate: 0.3", "each seed", "untrained 30.0 %", "too &lt;large&gt;", "&lt;config&gt;.py"):
        assert fact in page, fact
    assert page.count('<tr class="marked">') == 2  # both runs at the best rate
    assert "| lr = 20 \\| too <large> |" in text and "- Best learning rate: 0.3" in text
    assert "<svg" in (tmp_path / "results.svg").read_text()


def test_a_study_without_a_result_has_a_page(tmp_path):
    study, rows = make_study(tmp_path), study_rows()[-1:]
    findings = find_in_rows(study.kind, rows)
    assert "there is no best learning rate" in render(study_page(study, rows, findings))
    assert "diverged" in study_markdown(study, rows, findings)
