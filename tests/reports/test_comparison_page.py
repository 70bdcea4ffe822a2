"""The comparison page: figures, evaluations and differing keys of runs, from their files alone."""

import json
import random

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.reports.comparison_page import comparison_text, differing_table, short_names, write_comparison
from tests.tiny import tiny_config


def write_run(folder, *, probe, lr, evaluated=True, finished=True, source="shapes", **more):
    folder.mkdir(parents=True)
    config = tiny_config(optim__lr=lr).to_dict()
    config["data"]["source"] = source
    (folder / "config.json").write_text(json.dumps(config))
    rows = [
        {"step": step, "epoch": step / 4, "time": step, "train/loss": 1 / step, "speed/images_per_sec": 100.0 * step}
        | ({"eval/online_probe_accuracy": 10.0 * step} if step % 4 == 0 else {})
        for step in range(1, 9)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        summary = {"status": "finished", "probe_accuracy": probe, "untrained_probe_accuracy": 20.0, "steps": 8} | more
        (folder / "summary.json").write_text(json.dumps(summary))
    if evaluated:
        (folder / "eval").mkdir()
        results = {"fine_tune": {"accuracy": probe + 5, "epoch": 2, "epochs": 4}}
        (folder / "eval" / "eval.json").write_text(json.dumps({"levels": {"0": results}}))
    return folder


def test_runs_side_by_side(tmp_path):
    one = write_run(tmp_path / "one", probe=50.0, lr=0.1)
    two = write_run(tmp_path / "two", probe=60.0, lr=0.2, evaluated=False)
    result = write_comparison([one, two])
    assert result["output"] == str(tmp_path / "comparison.html")
    assert result["differing_keys"] == ["optim.lr"]
    assert result["runs"]["one"]["probe_accuracy"] == 50 and result["runs"]["two"]["probe_accuracy"] == 60
    assert result["runs"]["one"]["evaluation"]["0"]["Fine-tuned"] == "55.0 %, epoch 2 of 4"
    page = (tmp_path / "comparison.html").read_text()
    for text in ("+30.0 points", "+40.0 points", "optim.lr", "Not evaluated: two", "55.0 %, epoch 2 of 4", ">Loss<"):
        assert text in page
    assert 'src="http' not in page
    table = comparison_text(result["runs"])
    assert "one" in table.splitlines()[0] and "60.0 %" in table and "55.0 %" in table


def identity(sha, images=50_000):
    return {"train": {"images": images, "sha256": sha}, "test": {"images": 10_000, "sha256": sha}}


def compare_two(folder, one, two):
    """Returns the warnings of a comparison of two runs with these figures, which their page shows too."""
    paths = [write_run(folder / name, probe=50.0, lr=0.1, **more) for name, more in (("a", one), ("b", two))]
    warnings = write_comparison(paths)["warnings"]
    page = (folder / "comparison.html").read_text()
    assert all(text in page for text in warnings)
    return warnings


@pytest.mark.parametrize(
    "one, two, says",
    [
        ({"source": "cifar10"}, {"source": "shapes"}, "different data (a: cifar10, b: shapes)"),
        ({"data_identity": identity("a1")}, {"data_identity": identity("b2")}, "different images from shapes (a: 50,"),
        ({"data_identity": identity("a", 9)}, {"data_identity": identity("a", 8)}, "(a: 9 train [a] and 10,000 test"),
        ({"probe_test_images": 10_000}, {"probe_test_images": 512}, "numbers of test images (a: 10,000, b: 512)."),
    ],
)  # fmt: skip
def test_runs_on_different_data_or_test_images_are_warned_of(tmp_path, one, two, says):
    (warning,) = compare_two(tmp_path, one, two)
    assert says in warning


def test_runs_on_the_same_data_are_compared_without_a_warning(tmp_path):
    same = {"data_identity": identity("a1"), "probe_test_images": 10_000}
    assert compare_two(tmp_path, same, same) == []


def test_a_run_that_is_not_finished_takes_part(tmp_path):
    one = write_run(tmp_path / "one", probe=50.0, lr=0.1)
    two = write_run(tmp_path / "two", probe=0.0, lr=0.1, evaluated=False, finished=False)
    (two / "metrics.jsonl").write_text("")
    result = write_comparison([one, two], tmp_path / "page.html")
    assert result["runs"]["two"]["status"] == "not finished"
    assert result["differing_keys"] == []
    page = (tmp_path / "page.html").read_text()
    assert "The configs are equal." in page and "not finished" in page


def test_names_tell_runs_apart(tmp_path):
    assert short_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert short_names([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]


def test_keys_of_one_config_alone_differ():
    rows = differing_table([{"a": 1, "b": {"c": [1, 2]}}, {"a": 1, "b": {"c": (1, 2), "d": 3}}])
    assert rows == [["b.d", "(absent)", "3"]]


def test_mistakes_are_named(tmp_path):
    run = write_run(tmp_path / "run", probe=1.0, lr=0.1)
    with pytest.raises(UserError, match="two runs or more"):
        write_comparison([run])
    with pytest.raises(UserError, match="no such folder"):
        write_comparison([run, tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        write_comparison([run, tmp_path / "empty"])
    other = write_run(tmp_path / "other", probe=1.0, lr=0.1)
    with pytest.raises(UserError, match="--output"):
        write_comparison([run, other], tmp_path / "no" / "page.html")


HOSTILE = (None, True, -1, 10**400, 1e400, "x", "\ud800", [], [[1]], {}, {"a": {"b": [None]}}, {"train": 3}, {"0": []})


def test_altered_files_of_runs_are_compared_without_an_exception(tmp_path):
    whole = {"data_identity": identity("a1"), "probe_test_images": 32, "baselines": {}, "num_classes": 10}
    paths = [write_run(tmp_path / name, probe=50.0, lr=0.1, **whole) for name in ("a", "b")]
    places = [("summary.json", key) for key in json.loads((paths[1] / "summary.json").read_text())]
    places += [("config.json", "data"), ("config.json", "method"), ("eval/eval.json", "levels")]
    for name, key in places:
        file = paths[1] / name
        before = json.loads(file.read_text())
        for value in random.Random(key).sample(HOSTILE, 3):
            file.write_text(json.dumps(before | {key: value}))
            comparison_text(write_comparison(paths)["runs"])
        file.write_text(json.dumps(before))
    results = {"fine_tune": 3, "knn": {"accuracy": []}, "few_shot": {"shots": []}, "feature_quality": {"collapse": []}}
    (paths[1] / "eval" / "eval.json").write_text(json.dumps({"levels": {"0": results, "x": {}, "1": None}}))
    comparison_text(write_comparison(paths)["runs"])
