"""The evaluation command: every protocol on a tiny run, features computed once, clear answers to mistakes."""

import json
import pathlib

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.evals import trained_encoder
from jepa_jax.evals.evaluate import evaluate, without_large_parts
from jepa_jax.evals.features import FeatureCache, Split
from jepa_jax.evals.protocols import PROTOCOLS, Limits, parse_levels, parse_protocols
from tests.evals.untrained_run import quiet, write_run
from tests.runs import unlabelled
from tests.tiny import tiny_config, tiny_masked_config

LIMITS = Limits(fine_tune_epochs=1, lidar_images=20, lidar_views=4, pictured_points=40)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
    config = tiny_config(data__num_train=160, data__num_test=80)
    folder = tmp_path_factory.mktemp("evaluate") / "tiny"
    write_run(config, folder)
    return folder


@pytest.fixture(scope="module")
def evaluation(run):
    found = evaluate(run, limits=LIMITS, console=quiet())
    (run / "eval" / "eval.json").write_text(json.dumps(found.record))
    return found


@pytest.fixture(scope="module")
def record(evaluation):
    return evaluation.record


def test_every_protocol_has_figures(record):
    assert list(record["levels"]) == ["0"]
    results = record["levels"]["0"]
    assert list(results) == list(PROTOCOLS)
    for name in ("linear_probe", "knn", "fine_tune"):
        assert 0 <= results[name]["accuracy"] <= 100
    assert np.sum(results["linear_probe"]["confusion"]) == 80
    assert results["knn"]["fixed_k"] == 20 and results["knn"]["fixed_temperature"] == 0.07
    assert results["fine_tune"]["encoder_change"] > 0
    assert results["feature_quality"]["lidar"] >= 1
    assert all("interval_95" in shot for shot in results["few_shot"]["shots"].values())


def test_arrays_for_figures_come_along_and_caps_are_stated(evaluation):
    assert evaluation.levels == [0] and evaluation.protocols == list(PROTOCOLS) and not evaluation.extends_earlier
    assert evaluation.points[0].features.shape[0] == 40
    assert evaluation.patches is None  # the encoder has no grid of patches
    record = evaluation.record
    assert record["limits"]["fine_tune_epochs"] == 1 and record["train_images"] == 160
    assert json.dumps(without_large_parts(record)).count("confusion") == 0


def test_features_are_computed_once(run, record, monkeypatch):
    monkeypatch.setattr(trained_encoder, "extract", lambda *a, **k: pytest.fail("features were extracted again"))
    again = evaluate(run, protocols="linear_probe,feature_quality", limits=LIMITS, console=quiet())
    assert again.extends_earlier
    for name in ("linear_probe", "feature_quality"):
        before, after = (dict(r["levels"]["0"][name], seconds=0) for r in (record, again.record))
        assert before == after
    # What was measured before and not now is kept.
    assert again.record["levels"]["0"]["few_shot"] == record["levels"]["0"]["few_shot"]


def test_levels_of_a_hierarchy(tmp_path):
    config = tiny_masked_config("hjepa", data__num_train=64, data__num_test=40, method__level_weights=(1.0, 0.5))
    write_run(config, tmp_path / "run")
    found = evaluate(tmp_path / "run", protocols="knn,feature_quality", limits=LIMITS, console=quiet())
    assert list(found.record["levels"]) == ["0", "1"]
    images, maps = found.patches
    assert len(images) == len(maps) == 10 and maps.ndim == 4
    with pytest.raises(UserError, match="--levels=2.*levels 0, 1"):
        evaluate(tmp_path / "run", protocols="knn", levels="2", console=quiet())


def test_without_labels_feature_quality_is_measured_and_the_rest_refused(tmp_path):
    config = tiny_config(**unlabelled(tmp_path))
    write_run(config, tmp_path / "run")
    found = evaluate(tmp_path / "run", limits=LIMITS, console=quiet())
    assert found.protocols == ["feature_quality"] and found.record["classes"] == []
    quality = found.record["levels"]["0"]["feature_quality"]
    assert 1 <= quality["effective_rank"] <= 16 and 1 <= quality["lidar"] <= 16
    assert found.points[0].features.shape == (32, 16) and not len(found.points[0].labels)
    with pytest.raises(UserError, match="--protocols=knn: knn needs labels, which the data has not; use feature_qual"):
        evaluate(tmp_path / "run", protocols="knn", console=quiet())


def test_names_are_checked():
    assert parse_protocols("few_shot, knn") == ["knn", "few_shot"]
    assert parse_protocols("all") == list(PROTOCOLS)
    assert parse_levels("1,0,1", 3) == [0, 1] and parse_levels("all", 2) == [0, 1]
    with pytest.raises(UserError, match="'k-nn' is no protocol.*linear_probe,knn,feature_quality"):
        parse_protocols("k-nn")
    with pytest.raises(UserError, match="'x' is no level.*level 0 alone"):
        parse_levels("x", 1)


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        evaluate(tmp_path / "nowhere", console=quiet())
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_dict()))
    with pytest.raises(UserError, match="holds no checkpoint"):
        evaluate(tmp_path, console=quiet())


def test_missing_data_is_named(run, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    config = json.loads((run / "config.json").read_text())
    config["data"] |= {"source": "cifar10", "dir": str(tmp_path / "none"), "image_size": 32}
    (moved / "config.json").write_text(json.dumps(config))
    (moved / "checkpoints").symlink_to(run / "checkpoints")
    with pytest.raises(UserError, match="none"):
        evaluate(moved, console=quiet())


def test_limits_that_leave_nothing_are_refused(run):
    with pytest.raises(UserError, match="--fine_tune_epochs=0: must be at least 1"):
        evaluate(run, limits=Limits(fine_tune_epochs=0), console=quiet())


def test_the_cache_forgets_other_encoders_and_survives_damage(tmp_path):
    split = Split(np.ones((3, 2), np.float32), np.arange(3))
    first = FeatureCache(tmp_path, {"step": 1})
    first.get("a", lambda: split)
    np.testing.assert_array_equal(first.get("a", lambda: pytest.fail("not cached")).features, split.features)
    assert first.hits == 1
    stored = next(tmp_path.glob("*.npz"))
    stored.write_bytes(stored.read_bytes()[:40])
    np.testing.assert_array_equal(first.get("a", lambda: split).labels, split.labels)
    FeatureCache(tmp_path, {"step": 2})
    assert not list(tmp_path.glob("*.npz"))
