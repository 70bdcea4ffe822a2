"""The page and the table of a sweep: what was measured is there, what was not says so, nothing is fetched."""

import re

import pytest

from jepa_jax.reports import sweep_report
from jepa_jax.reports.charts import Series, line_chart
from jepa_jax.tuning.recommendation import recommend
from jepa_jax.tuning.rows import rows_to_json
from tests.tiny import tiny_config
from tests.tuning.made_rows import make_row

GIB = 2**30


def measured(speeds, **values):
    return make_row(speeds, **{"step_time_p50": 0.064, "data_wait_fraction": 0.02} | values)


@pytest.fixture
def document():
    rows = [
        measured([100, 101, 99], batch_size=64, peak_memory_bytes=2 * GIB),
        measured([150, 151, 152], batch_size=128, num_workers=2, peak_memory_bytes=4 * GIB),
        measured([90, 91, 92], batch_size=128, precision="bfloat16", peak_memory_bytes=3 * GIB, leak=True,
                 memory_slope_bytes_per_step=2**20),
        make_row([], batch_size=256, status="out_of_memory", reason="wanted <12> GiB | more"),
    ]  # fmt: skip
    config = tiny_config(data__batch_size=64)
    header = {
        "command": "python scripts/profile_throughput.py --x=<y>", "created": "2025-01-02", "config_name": "tiny",
        "hardware": {"cpu": "A processor", "cores": 2}, "versions": {"jax": "0.1"}, "memory_limit_bytes": 8 * GIB,
        "max_batches": 8, "warmup_batches": 2, "repeats": 3, "config_hash": "abc", "config": config.to_dict(),
    }  # fmt: skip
    conclusion = recommend(rows, config=config).to_dict()
    return {"header": header, "rows": rows_to_json(rows), "conclusion": conclusion}


def test_the_page_holds_the_choice_the_failures_and_the_provenance(document, tmp_path):
    sweep_report.write_html(document, tmp_path / "sweep.html")
    page = (tmp_path / "sweep.html").read_text()
    assert "Use batch 128, 2 workers, float32" in page
    assert "wanted &lt;12&gt; GiB | more" in page and "1.00 MiB a step" in page
    assert "--x=&lt;y&gt;" in page and "A processor" in page
    assert "3 of 4 measured" in page
    assert "limit 8.0 GiB" in page
    assert page.count('class="chart"') == 3


def test_the_page_asks_no_network_for_anything(document):
    page = sweep_report.page(document)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert "default-src 'none'" in page


def test_every_row_is_in_the_sortable_table_the_choice_marked(document):
    page = sweep_report.page(document)
    table = page[page.index('class="sortable"') :]
    body = table[table.index("<tbody>") : table.index("</tbody>")]
    assert body.count("<tr") == 4
    assert re.search(r'<tr class=marked><td data-v="128"', body)
    assert 'data-v="150.9' in body  # sorted by the number, not by its text


def test_nothing_measured_yet_is_a_page_too(document):
    rows = [row | {"status": "pending", "samples_per_sec": None, "repeats": []} for row in document["rows"]]
    page = sweep_report.page(document | {"rows": rows, "conclusion": {}})
    assert "No combination was measured." in page
    assert sweep_report.page({"header": {}, "rows": [], "conclusion": {}})


def test_the_markdown_table_has_a_line_a_row_the_fastest_first(document):
    header, rule, *lines = sweep_report.markdown_table(document["rows"]).splitlines()
    assert len(lines) == 4 and header.count("|") == rule.count("|") == lines[0].count("|")
    assert lines[0].startswith("| 128 | 2 | 1 | float32") and "151" in lines[0]
    assert lines[-1].endswith("out of memory: wanted <12> GiB \\| more |")
    assert "GPU" not in header  # no row has that figure


def test_interval_bars_are_drawn_where_there_is_an_interval_and_the_axis_holds_them():
    chart = line_chart("t", [Series("a", [1, 2], [10, 20], intervals=[(8, 50), None])], x_ticks=[1, 2])
    assert chart.count("opacity:.8") == 1
    assert ">40<" in chart
