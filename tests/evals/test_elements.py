"""Elements that are no images: runs, probes of numbers, encoders, exports and studies of scenes and time series."""

import json
import pathlib

import jax.export
import numpy as np
import pytest

import jepa_jax
from jepa_jax.base.errors import UserError
from jepa_jax.cli.main import main
from jepa_jax.data.contract import element_bytes, spec_from_json, spec_to_json
from jepa_jax.evals.evaluate import evaluate
from jepa_jax.exports.embed import embed_arrays, open_embedder
from jepa_jax.exports.export import export_encoder
from jepa_jax.reports.evaluation_page import evaluation_markdown, write_evaluation
from jepa_jax.reports.run_report import write_report
from tests.fixtures.elements import Scenes, Series
from tests.runs import Silent

RECIPE = pathlib.Path(__file__).parents[1] / "fixtures" / "scenes_config.py"
SOURCES = {"Scenes": Scenes, "Series": Series}


@pytest.fixture(scope="module", params=SOURCES)
def trained(request, tmp_path_factory):
    """Name of a source, folder, summary and console of a run."""
    folder, console = tmp_path_factory.mktemp(request.param) / "run", Silent()
    config = jepa_jax.get_config(f"{RECIPE}:{request.param}", mesh__data=1)
    return request.param, folder, jepa_jax.train(config, folder, console=console), console


def some(name, encoder):
    source = SOURCES[name](encoder.config.data, "test")
    return {key: array for key, array in source.batch(np.arange(5)).items() if key in encoder.inputs}


def test_a_run_probes_numbers_and_speaks_of_elements(trained):
    name, folder, summary, console = trained
    assert summary["status"] == "finished" and summary["failed_evaluators"] == {}
    coordinates = {"Scenes": 3, "Series": 1}[name]
    assert len(summary["target_r2_by_coordinate"]) == len(summary["target_rmse"]) == coordinates
    assert summary["untrained_target_r2"] != summary["target_r2"] and summary["lidar"] > 0
    assert summary["effective_rank"] > 1 and np.isfinite(summary["validation_loss"])
    text = "\n".join(console.lines)
    assert "elements/s" in text and "images/s" not in text and "resnet" not in text
    assert ("64 test scenes" in text) == (name == "Scenes")
    page = write_report(folder).read_text().lower()
    assert "elements per second" in page and "images per second" not in page
    stored = spec_from_json(json.loads((folder / "elements.json").read_text()))
    assert stored == dict(SOURCES[name].spec)


def test_an_encoder_of_other_elements_takes_the_arrays_that_it_reads(trained):
    name, folder, _, _ = trained
    encoder = jepa_jax.load_encoder(folder, batch_size=4)
    arrays = some(name, encoder)
    assert list(encoder.inputs) == {"Scenes": ["objects", "adjacency"], "Series": ["series"]}[name]
    features = encoder(arrays)
    assert features.shape == (5, 8) == (5, encoder.feature_dim)
    first = next(iter(arrays))
    if name == "Series":
        np.testing.assert_array_equal(encoder(arrays[first]), features)
    else:
        with pytest.raises(UserError, match="adjacency: not given; this encoder takes a dict of objects, adjacency"):
            encoder({first: arrays[first]})
    with pytest.raises(UserError, match=rf"{first}: float64 .*; this encoder takes float32 \[N, "):
        encoder({**arrays, first: arrays[first].astype(np.float64)})


def test_its_export_gives_the_same_features_with_jax_alone(trained, tmp_path):
    name, folder, _, _ = trained
    encoder = jepa_jax.load_encoder(folder)
    made = export_encoder(folder, "stablehlo", tmp_path / "out")
    function = jax.export.deserialize(bytearray((tmp_path / "out" / "encoder.stablehlo").read_bytes()))
    arrays = some(name, encoder)
    np.testing.assert_allclose(function.call(arrays), encoder(arrays), rtol=1e-5, atol=1e-6)
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(f'"{key}": {key},  # {made.inputs[key]}' in card for key in arrays) and "resnet" not in card
    with pytest.raises(UserError, match="--format=safetensors: is for encoders of images, this one takes .*stablehlo"):
        export_encoder(folder, "safetensors", tmp_path / "other")


def test_features_of_a_file_of_arrays(trained, tmp_path):
    name, folder, _, _ = trained
    encoder = jepa_jax.load_encoder(folder)
    arrays = some(name, encoder)
    np.savez(tmp_path / "in.npz", **arrays)
    made = embed_arrays(str(folder), tmp_path / "in.npz", tmp_path / "out.npz", 2)
    with np.load(made.output) as stored:
        np.testing.assert_allclose(stored["features"], encoder(arrays), rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match=r"this encoder takes .*; put these arrays into --input=FILE.npz"):
        open_embedder(workdir=str(folder), weights=None)


def test_an_evaluation_has_what_needs_no_labels(trained):
    name, folder, summary, _ = trained
    console = Silent()
    evaluation = evaluate(
        folder, protocols="ridge_probe,feature_quality" if name == "Series" else "all", console=console
    )
    assert list(evaluation.protocols) == ["ridge_probe", "feature_quality"]
    probe = evaluation.record["levels"]["0"]["ridge_probe"]
    assert probe["r2"] == pytest.approx(summary["target_r2"], abs=1e-6)
    assert probe["untrained"]["r2"] == pytest.approx(summary["untrained_target_r2"], abs=1e-6)
    assert probe["coordinates"] == {"Scenes": ["centre[0]", "centre[1]", "pairs"], "Series": ["target"]}[name]
    assert f"test {'scenes' if name == 'Scenes' else 'elements'}" in evaluation_markdown(evaluation.record)
    if name == "Series":
        return
    write_evaluation(evaluation)
    assert "Ridge probe" in (folder / "eval" / "eval.html").read_text()
    with pytest.raises(UserError, match="--protocols=knn: knn needs labels, which the data has not; use ridge_probe"):
        evaluate(folder, protocols="knn", console=console)
    with pytest.raises(UserError, match="--attention: shows images"):
        evaluate(folder, attention=True, console=console)


def test_describe_speaks_of_elements(capsys):
    assert main(["describe", f"--config={RECIPE}", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["elements"] == "elements" and facts["feature_dim"] == 8 and facts["config"]["model"] == {"name": ""}


@pytest.mark.slow  # two processes that start jax
def test_rates_are_compared_by_validation_loss(tmp_path, capsys):
    flags = ["--lrs=1e-4,3e-2", "--epochs=1", f"--output_dir={tmp_path}", "--json"]
    assert main(["lr-search", f"--config={RECIPE}", *flags]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["chosen_by"] == "validation_loss" and facts["best_lr"] == 0.03
    assert "Validation loss" in (tmp_path / "study.html").read_text()


def test_specs_survive_json():
    assert spec_from_json(json.loads(json.dumps(spec_to_json(Scenes.spec)))) == Scenes.spec
    assert element_bytes(Series.spec) == 24 * 2 * 4 + 4
