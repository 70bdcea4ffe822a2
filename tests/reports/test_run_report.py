"""report.html: complete for a finished run, in words for a broken one, small for a long one."""

import json
import os
import re

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.reports import run_report
from jepa_jax.reports.parts import Section
from jepa_jax.reports.run_files import SUMMARY_ROWS, collect_metrics, json_pairs, read_run
from jepa_jax.reports.run_report import write_report

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)


def write_run(workdir, steps=40):
    rows = [
        {
            "step": step, "epoch": step / 10, "time": step * 0.5, "train/loss": 30 / step, "train/invariance": 1 / step,
            "train/covariance": 0.1, "train/lr": 0.3, "train/grad_norm": 2.0, "speed/images_per_sec": 900 + step,
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip
    rows.append({"step": steps, "epoch": steps / 10, "time": steps / 2, "eval/online_probe_accuracy": 61.25})
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"method": {"name": "image_jepa"}, "data": {"source": "shapes", "augment": {"crop": [0.2, 1.0]}}}
    (workdir / "config.json").write_text(json.dumps(config))
    summary = {
        "status": "finished", "probe_accuracy": 71.34, "untrained_probe_accuracy": 38.12, "knn_accuracy": 60.4,
        "online_probe_accuracy": 61.25, "chance_accuracy": 12.5, "images_per_sec": 931.0, "wall_seconds": 173.2,
        "steps": steps, "epochs": 4.0, "baselines": {"Raw pixels": 41.0}, "peak_memory_bytes": 3 * 2**29,
    }  # fmt: skip
    (workdir / "summary.json").write_text(json.dumps(summary))
    (workdir / "environment.json").write_text(json.dumps({"jax": "0.10.2", "command": "train --a=<b>"}))
    (workdir / "views.png").write_bytes(PNG)
    return workdir


def text_of(path):
    return path.read_text(encoding="utf-8")


def test_a_finished_run_shows_its_figures(tmp_path):
    page = text_of(write_report(write_run(tmp_path)))
    for fact in (
        "71.3 %",
        "+33.2 points",
        "38.1 %",
        "12.5 %",
        "41.0 %",
        "2 min 53 s",
        "931",
        "1.50 GiB",
        "augment.crop",
    ):
        assert fact in page, fact
    for chart in ("Loss", "Terms of the loss", "Learning rate", "Norms", "Accuracy", "Images per second"):
        assert f"<h3>{chart}</h3>" in page, chart
    assert "invariance" in page and "covariance" in page
    assert "data:image/png;base64," in page
    assert "train --a=&lt;b&gt;" in page


def test_the_page_asks_for_nothing_outside_itself(tmp_path):
    page = text_of(write_report(write_run(tmp_path)))
    assert not re.search(r"https?:|@import|url\((?!data:)|<link(?![^>]*href=\"data:,\")", page)
    assert all(source.startswith("data:") for source in re.findall(r'src="([^"]*)"', page))
    assert "default-src 'none'" in page


def test_nothing_but_the_report_is_left(tmp_path):
    before = set(os.listdir(write_run(tmp_path)))
    write_report(tmp_path)
    write_report(tmp_path)
    assert set(os.listdir(tmp_path)) == before | {"report.html"}


def test_an_empty_workdir_is_described_in_words(tmp_path):
    page = text_of(write_report(tmp_path))
    for name in ("config.json", "metrics.jsonl", "summary.json", "environment.json", "views.png"):
        assert f"{name} has not been written" in page, name
    assert "not finished" in page and "No accuracy has been measured" in page
    assert "This part failed" not in page


def test_a_missing_workdir_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        write_report(tmp_path / "absent")


def test_a_broken_file_never_raises(tmp_path):
    write_run(tmp_path)
    for name in ("config.json", "summary.json", "environment.json", "metrics.jsonl", "views.png"):
        whole = (tmp_path / name).read_bytes()
        for content in (b"", b"{", b"[1, 2]", b"\xff\xfe\x00", b'{"step": "x", "probe_accuracy": [1]}', b"null\n"):
            (tmp_path / name).write_bytes(content)
            assert "This part failed" not in text_of(write_report(tmp_path)), (name, content)
        (tmp_path / name).write_bytes(whole)


def test_wrong_types_in_the_summary_never_raise(tmp_path):
    write_run(tmp_path)
    keys = list(SUMMARY_ROWS) + ["baselines"]
    for value in (None, "nan", "text", [], {}, True, 1e400, -1, 10**400):
        (tmp_path / "summary.json").write_text(json.dumps(dict.fromkeys(keys, value)))
        assert "This part failed" not in text_of(write_report(tmp_path))


def test_a_cut_off_last_line_costs_only_that_line(tmp_path):
    write_run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "train/lo')
    run = read_run(tmp_path)
    assert run.latest("train/loss") == pytest.approx(30 / 40)
    assert "1 lines" in run.problems["metrics.jsonl"]


def test_one_row_and_values_that_are_not_finite(tmp_path):
    row = '{"step": 1, "epoch": 0.1, "train/loss": NaN, "train/lr": "inf", "train/grad_norm": null, "train/a": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(row)
    page = text_of(write_report(tmp_path))
    assert page.count("not finite") == 3 and "too few for curves" in page
    assert "This part failed" not in page


def test_a_repeated_step_counts_once_with_its_later_value():
    rows = [{"step": s, "train/loss": float(s)} for s in (1, 2, 3)] + [{"step": 2, "train/loss": 9.0}]
    steps, values = collect_metrics(rows)["train/loss"]
    assert steps.tolist() == [1, 2, 3] and values.tolist() == [1, 9, 3]


def test_while_training_the_last_evaluation_stands_in_for_the_summary(tmp_path):
    (write_run(tmp_path) / "summary.json").unlink()
    assert "61.2 %" in text_of(write_report(tmp_path))


def test_one_failing_part_leaves_the_others(tmp_path, monkeypatch):
    def broken(run):
        raise ZeroDivisionError("by <zero>")

    monkeypatch.setattr(run_report, "SECTIONS", [broken, lambda run: Section("Mine", ["here"])])
    page = text_of(write_report(write_run(tmp_path)))
    assert "This part failed: ZeroDivisionError: by &lt;zero&gt;" in page and "<p>here</p>" in page


def test_hostile_names_are_escaped(tmp_path):
    workdir = tmp_path / "<i>run"
    workdir.mkdir()
    write_run(workdir)
    (workdir / "config.json").write_text(json.dumps({"<b>": {"<u>": "</td><script>"}, "method": {"name": "<s>"}}))
    (workdir / "summary.json").write_text(json.dumps({"baselines": {"<em>": 1.0}, "num_classes": 2, "status": "<q>"}))
    page = text_of(write_report(workdir))
    for tag in ("<i>run", "<b>{", "<b>&", "<u>", "<s>", "<em>", "<q>", "</td><script>"):
        assert tag not in page, tag
    for text in ("&lt;i&gt;run", "&lt;b&gt;", "&lt;u&gt;", "&lt;s&gt;", "&lt;em&gt;", "&lt;q&gt;"):
        assert text in page, text


def test_values_are_shown_as_json_writes_them():
    assert json_pairs({"a": {"b": [1, 2.5], "c": ""}, "d": None, "e": "text", "f": True}) == [
        ("a.b", "[1, 2.5]"), ("a.c", '""'), ("d", "null"), ("e", "text"), ("f", "true"),
    ]  # fmt: skip


def test_long_runs_stay_small_and_keep_their_extremes(tmp_path):
    steps, generator = 20_000, np.random.default_rng(0)
    keys = ["train/loss", "train/invariance", "train/variance", "train/covariance", "train/lr", "train/grad_norm"]
    values = generator.normal(10, 1, (steps, len(keys))).round(6)
    values[12_345, 0] = 77.0
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step, row in enumerate(values.tolist()):
            file.write(json.dumps({"step": step, "epoch": step / 1000, **dict(zip(keys, row, strict=True))}) + "\n")
    path = write_report(tmp_path)
    assert path.stat().st_size < 2_000_000
    assert "77.0" in text_of(path)


def test_a_failed_write_leaves_the_old_report(tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text("old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(UserError, match="disk full"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old" and os.listdir(tmp_path) == ["report.html"]
