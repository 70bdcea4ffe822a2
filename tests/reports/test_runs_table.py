"""`jepa-jax runs`: every run below a folder, with what tells it apart; and `report`, which writes a page again."""

import json

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.cli.main import main
from jepa_jax.reports.run_report import write_report
from jepa_jax.reports.runs_table import ago, find_runs, runs_text, sorted_rows
from tests.reports.test_run_report import write_run


@pytest.fixture
def runs(tmp_path):
    for name, rate, accuracy in (("a", 0.1, 60.0), ("deep/b", 0.1, 80.0), ("c", 0.3, None)):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        write_run(folder)
        (folder / "config.json").write_text(json.dumps({"method": {"name": "mae"}, "optim": {"lr": rate}}))
        (folder / "environment.json").write_text(json.dumps({"command": "jepa-jax train --config=configs/rapid.py"}))
        if accuracy is None:
            (folder / "summary.json").unlink()
        else:
            (folder / "summary.json").write_text(json.dumps({"status": "finished", "probe_accuracy": accuracy}))
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "config.json").write_text("{}")  # no run
    return tmp_path


def test_each_run_is_a_row_with_what_tells_it_apart(runs):
    rows = {row["run"]: row for row in find_runs(runs)}
    assert rows.keys() == {"a", "deep/b", "c"}
    assert rows["c"]["differs_in"] == "optim.lr=0.3" and rows["a"]["differs_in"] == ""
    assert rows["c"]["status"] == "not finished" and rows["c"]["steps"] == 40 and rows["a"]["recipe"] == "rapid"
    assert [row["run"] for row in sorted_rows(list(rows.values()), "accuracy")] == ["deep/b", "a", "c"]
    with pytest.raises(UserError, match="--sort=speed: no such column"):
        sorted_rows(list(rows.values()), "speed")
    assert [ago(seconds) for seconds in (30, 600, 9000, 3e5)] == ["30 s", "10 min", "2 h", "3 days"]


def test_a_run_is_compared_with_those_of_its_recipe_alone_and_a_narrow_terminal_gets_fewer_columns(runs):
    (runs / "c" / "environment.json").write_text(json.dumps({"command": "jepa-jax train --config=other"}))
    assert not any(row["differs_in"] for row in find_runs(runs))
    (runs / "c" / "environment.json").write_text(json.dumps({"command": "jepa-jax train --config=rapid"}))
    wide, narrow = (runs_text(find_runs(runs), width).splitlines() for width in (200, 60))
    assert "\n  differs in optim.lr=0.3\n" in "\n".join(wide) and "size" in wide[0]
    assert max(map(len, narrow)) <= 60 and "accuracy" in narrow[0] and "size" not in narrow[0]


def test_the_command_lists_runs_and_writes_a_page(runs, capsys):
    assert main(["runs", str(runs), "--sort=run", f"--html={runs / 'runs.html'}"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["run"] for row in found] == ["a", "c", "deep/b"]
    assert "deep/b" in (runs / "runs.html").read_text()
    assert main(["runs", str(runs / "nowhere")]) == 2


def test_a_page_is_written_again_and_loads_itself_only_while_the_run_is_under_way(runs, capsys):
    assert main(["report", str(runs / "a"), "--watch"]) == 0  # it has ended: one page
    assert (
        "report.html" in capsys.readouterr().out and 'http-equiv="refresh"' not in (runs / "a/report.html").read_text()
    )
    assert 'http-equiv="refresh" content="5"' in write_report(runs / "c", refresh=5).read_text()


def test_without_labels_the_page_leads_with_what_is_known(runs):
    summary = {"status": "finished", "num_classes": 0, "effective_rank": 12.5, "alignment": 0.4, "uniformity": -2.5}
    (runs / "a" / "summary.json").write_text(json.dumps(summary | {"evaluation_note": "Measured on 512 images: x."}))
    page = write_report(runs / "a").read_text()
    assert "12.5" in page and "Uniformity" in page and "not measured yet" not in page and ">Chance<" not in page
    assert "Measured on 512 images: x." in page
