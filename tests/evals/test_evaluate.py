"""The evaluation command: every protocol on a tiny run, features computed once, clear answers to mistakes."""

import contextlib
import dataclasses
import io
import json
import pathlib

import numpy as np
import pytest

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.cli.main import main
from jepa_jax.evals.evaluate import PROTOCOLS, evaluate, parse_levels, parse_protocols, without_large_parts
from jepa_jax.evals.evaluators import Limits
from jepa_jax.evals.features import FeatureCache, Split
from jepa_jax.evals.inference import FrozenEncoder, load_encoder, load_run
from tests.evals.untrained_run import quiet, write_run
from tests.runs import one_class, unlabelled
from tests.tiny import tiny_config, tiny_masked_config

LIMITS = Limits(fine_tune_epochs=1, lidar_images=20, lidar_views=4, pictured_points=40)
# Probes of patches and layers have tests of their own.
OF_LABELS = [name for name, one in PROTOCOLS.items() if one.needs in ("", "labels") and not one.reads]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
    config = tiny_config(data__num_train=160, data__num_test=80)
    folder = tmp_path_factory.mktemp("evaluate") / "tiny"
    write_run(config, folder)
    return folder


@pytest.fixture(scope="module")
def evaluation(run):
    return evaluate(run, protocols=",".join(OF_LABELS), limits=LIMITS, console=quiet())


@pytest.fixture(scope="module")
def record(evaluation):
    return evaluation.record


@pytest.mark.parametrize("read", [load_run, load_encoder])
def test_a_method_without_features_is_refused_with_the_place_of_its_figures(tmp_path, read):
    method = dict(
        method__name="tests.sequence_methods:LineMethod",
        data__source="tests.sequences:SequenceSource",
    )
    write_run(tiny_config(**method), tmp_path / "sequences")
    with pytest.raises(
        UserError, match=r"LineMethod' learns no encoder .*sequences/summary.json and .*sequences/report.html"
    ):
        read(tmp_path / "sequences")


def test_every_protocol_has_figures(run, record):
    assert list(record["levels"]) == ["0"]
    results = record["levels"]["0"]
    assert list(results) == OF_LABELS
    for name in ("linear_probe", "knn", "fine_tune"):
        assert 0 <= results[name]["accuracy"] <= 100
    assert np.sum(results["linear_probe"]["confusion"]) == 80
    assert results["knn"]["fixed_k"] == 20 and results["knn"]["fixed_temperature"] == 0.07
    assert results["fine_tune"]["encoder_change"] > 0
    assert results["feature_quality"]["lidar"] >= 1
    assert all("interval_95" in shot for shot in results["few_shot"]["shots"].values())
    assert json.loads((run / "eval" / "eval.json").read_text()) == record


def test_chance_interval_and_the_untrained_encoder_stand_beside_every_protocol(record):
    results = record["levels"]["0"]
    for name in ("linear_probe", "knn", "fine_tune"):
        low, high = results[name]["interval_95"]
        assert low < results[name]["accuracy"] < high and 5 < high - low < 25  # of 80 images
        assert 10 <= results[name]["chance"] < 30
    # The checkpoint holds the encoder before its first step: both are the same, up to the calibration of statistics.
    assert results["linear_probe"]["untrained"]["accuracy"] == pytest.approx(results["linear_probe"]["accuracy"], abs=8)
    assert "confusion" not in results["linear_probe"]["untrained"]
    assert results["knn"]["untrained"].keys() >= {"accuracy", "fixed_accuracy"}
    assert results["few_shot"]["chance"] == 20 and results["few_shot"]["untrained"]["shots"].keys() == {"1", "5"}


class Cut(Console):
    """A terminal at which Ctrl-C is pressed when a protocol begins; keeps what was begun."""

    def __init__(self, at=""):
        super().__init__(io.StringIO())
        self.at, self.begun = at, []

    def start(self, what, total, done=0):
        if self.at and what == self.at:
            raise KeyboardInterrupt
        self.begun.append(what)


def test_an_interrupted_evaluation_goes_on_where_it_stopped(tmp_path):
    write_run(tiny_config(data__num_train=64, data__num_test=40), tmp_path / "run")
    first = dataclasses.replace(LIMITS, untrained=False)
    limits = dataclasses.replace(first, pictured_points=41)
    results, picture = (tmp_path / "run" / "eval" / name for name in ("eval.json", "knn_level7.svg"))
    picture.parent.mkdir()
    picture.write_text("of an earlier checkpoint")

    def measure(limits, at="", protocols="knn,few_shot"):
        """Returns what was begun, and eval.json."""
        with contextlib.suppress(KeyboardInterrupt):
            evaluate(tmp_path / "run", protocols=protocols, limits=limits, console=(console := Cut(at)))
        return console.begun, json.loads(results.read_text())

    begun, kept = measure(first, at="few-shot")
    assert begun[-1] == "k-NN" and list(kept["levels"]["0"]) == ["knn"] and not kept["complete"]
    assert not picture.exists()
    picture.write_text("of this checkpoint")
    begun, kept = measure(limits, at="few-shot")
    assert begun[-1] == "k-NN"  # other limits: not continued
    begun, done = measure(limits)
    assert "k-NN" not in begun and begun[-1] == "few-shot" and done["complete"]
    assert done["levels"]["0"]["knn"] == kept["levels"]["0"]["knn"]  # with its time
    begun, _ = measure(limits, protocols="few_shot")
    assert begun[-1] == "few-shot"  # a finished evaluation that is asked for again is measured again
    assert picture.exists()


def test_one_class_is_said_instead_of_an_accuracy_of_100_percent(tmp_path):
    config = tiny_config(**one_class(tmp_path))
    write_run(config, tmp_path / "run")
    console = Console(said := io.StringIO())
    found = evaluate(tmp_path / "run", limits=LIMITS, console=console)
    assert found.protocols == ["feature_quality"]
    assert "All images are of one class" in said.getvalue() and "one class" in found.record["notes"][0]
    with pytest.raises(UserError, match="--protocols=knn: All images are of one class, 0: no accuracy is measured"):
        evaluate(tmp_path / "run", protocols="knn", limits=LIMITS, console=quiet())


def test_arrays_for_figures_come_along_and_caps_are_stated(evaluation):
    assert evaluation.levels == [0] and evaluation.protocols == OF_LABELS
    assert evaluation.points[0].features.shape[0] == 40
    record = evaluation.record
    assert record["limits"]["fine_tune_epochs"] == 1 and record["train_images"] == 160
    assert json.dumps(without_large_parts(record)).count("confusion") == 0


def test_features_are_computed_once(run, record, monkeypatch):
    monkeypatch.setattr(FrozenEncoder, "extract", lambda *a, **k: pytest.fail("features were extracted again"))
    again = evaluate(run, protocols="linear_probe,feature_quality", limits=LIMITS, console=quiet())
    for name in ("linear_probe", "feature_quality"):
        before, after = (dict(r["levels"]["0"][name], seconds=0) for r in (record, again.record))
        assert before == after
    # What was measured before and not now is kept.
    assert again.record["levels"]["0"]["few_shot"] == record["levels"]["0"]["few_shot"]


@pytest.mark.slow
def test_levels_of_a_hierarchy(tmp_path):
    config = tiny_masked_config("hjepa", data__num_train=64, data__num_test=40, method__level_weights=(1.0, 0.5))
    write_run(config, tmp_path / "run")
    found = evaluate(tmp_path / "run", protocols="knn,feature_quality", limits=LIMITS, attention=True, console=quiet())
    assert list(found.record["levels"]) == ["0", "1"]
    images, patches, attention = found.examples
    assert images.shape == (8, 16, 16, 3) and patches.shape[:3] == (8, 8, 8) and attention.shape[2:] == (8, 8)
    read = attention.sum(axis=(2, 3))
    assert (read < 1).all() and (read > 0.9).all()  # the CLS token also reads itself
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
    assert parse_protocols("all") == [name for name in PROTOCOLS if name != "attentive_probe"]
    assert parse_levels("1,0,1", 3) == [0, 1] and parse_levels("all", 2) == [0, 1]
    with pytest.raises(UserError, match="'k-nn' is no protocol.*linear_probe,last_layers,attentive_probe"):
        parse_protocols("k-nn")
    with pytest.raises(UserError, match="'x' is no level.*level 0 alone"):
        parse_levels("x", 1)


def test_an_encoder_without_attention_is_refused_before_anything_is_measured(run, capsys):
    assert main(["evaluate", f"--workdir={run}", "--attention"]) == 2
    message = "attention: model.name = patchnet has no attention to patches; use a run with a ViT"
    assert message in " ".join(capsys.readouterr().err.split())


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


def test_limits_that_leave_nothing_are_refused(run, capsys):
    assert main(["evaluate", f"--workdir={run}", "--fine_tune_epochs=0"]) == 2
    assert "--fine_tune_epochs=0: 0 is not a positive integer" in capsys.readouterr().err


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


def test_features_of_a_run_can_be_pooled_otherwise(run):
    whole, quarters = (load_run(run, pool=pool).encoder.test_features().features for pool in ("mean", "grid2"))
    np.testing.assert_allclose(quarters.reshape(len(whole), 4, -1).mean(1), whole, rtol=1e-4, atol=1e-6)
    with pytest.raises(UserError, match=r"config.eval.pool = 'cls'.*use mean or grid2"):
        load_run(run, pool="cls")


def test_results_of_another_pool_leave_those_of_the_run_as_they_are(run, record):
    before = (run / "eval" / "eval.json").read_text()
    other = evaluate(run, protocols="knn", pool="grid2", limits=LIMITS, console=quiet())
    assert other.folder == run / "eval_grid2" and other.record["pool"] == "grid2"
    assert (run / "eval" / "eval.json").read_text() == before and record["pool"] == "mean"
