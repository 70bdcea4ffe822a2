"""The page and the table of a sweep: what was measured is there, what was not says why."""

import json
import pathlib
import re

import pytest

from jepa_jax.reports.page import render
from jepa_jax.reports.sweep_page import sweep_markdown, sweep_page, write_sweep

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
        "text": ["Nothing shown: keep the config as given."],
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
