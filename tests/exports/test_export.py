"""Exported encoders: read back with the same features, in transformers, and without this package."""

import dataclasses
import json
import re
import subprocess
import sys

import jax
import jax.export
import numpy as np
import pytest
from safetensors.numpy import save_file

from jepa_jax.base.errors import UserError
from jepa_jax.cli.main import main
from jepa_jax.data.augment import normalise
from jepa_jax.evals.inference import load_encoder
from jepa_jax.exports.embed import open_embedder
from jepa_jax.exports.export import export_encoder, transformers_files
from jepa_jax.models.registry import encoder_structure
from jepa_jax.program.initial_weights import saved_encoder
from jepa_jax.program.step import evaluated_variables
from jepa_jax.weights import load_model
from jepa_jax.weights.fit import fit_encoder
from jepa_jax.weights.names import saved_tensors
from tests.evals.untrained_run import write_run
from tests.exports.write_parity import GOLDEN, configs, shaken
from tests.stepping import build_program
from tests.tiny import tiny_config, tiny_masked_config
from tests.weights.golden import WEIGHTS, recorded

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), np.uint8)
RESNET = pytest.param("resnet_basic", marks=pytest.mark.slow)  # takes longer to compile
COMMAND = "python /home/ann/env/bin/jepa-jax train --config=tiny"
SUMMARY = {
    "status": "finished", "steps": 12, "epochs": 2.0, "probe_accuracy": 71.25, "untrained_probe_accuracy": 40.5,
    "knn_accuracy": 65.0, "chance_accuracy": 10.0, "probe_test_images": 32, "baselines": {"raw pixels": 39.4},
    "params_sha256": "abc", "data_identity": {"train": {"images": 4096, "sha256": "3ea7"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs with a ViT, a ResNet and a PatchNet."""
    made = {}
    for name, config in {"patchnet": tiny_config(), **configs()}.items():
        if name in ("patchnet", "ijepa", "resnet_basic"):
            made[name] = tmp_path_factory.mktemp("runs") / name
            write_run(config, made[name], shaken)
            (made[name] / "summary.json").write_text(json.dumps(SUMMARY))
            (made[name] / "environment.json").write_text(json.dumps({"command": COMMAND}))
    return made


def pixels(encoder):
    augment = encoder.config.data.augment
    return np.asarray(normalise(IMAGES, augment.mean, augment.std))


@pytest.mark.parametrize("name", ["patchnet", "ijepa", RESNET])
def test_safetensors_are_read_back_bit_for_bit_with_the_same_features(name, runs, tmp_path):
    encoder = load_encoder(runs[name], batch_size=5)
    export_encoder(runs[name], "safetensors", tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    ours = encoder.module
    saved, read = saved_tensors(ours, None), saved_tensors(loaded.module, None)
    assert saved.keys() == read.keys() and all(saved[key].tobytes() == read[key].tobytes() for key in saved)
    original = dataclasses.replace(loaded, module=ours)  # before anything was written
    np.testing.assert_array_equal(loaded.features(pixels(encoder)), original.features(pixels(encoder)))
    np.testing.assert_allclose(loaded.features(pixels(encoder)), encoder(IMAGES), rtol=1e-5, atol=1e-5)
    again = saved_encoder(str(tmp_path / "out"))  # what model.init_from reads
    fitted, notes = fit_encoder(again, encoder_structure(encoder.config.model), 3, encoder.params["encoder"])
    jax.tree.map(np.testing.assert_array_equal, fitted, jax.device_get(encoder.params["encoder"]))
    assert notes == []
    assert features_of_the_card(tmp_path / "out").shape == (2, encoder.feature_dim)


def features_of_the_card(folder):
    """Runs the code of a model card as a reader would; returns its features."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(code.replace("FOLDER", str(folder)), names)
    return names["features"]


@pytest.mark.parametrize("name", ["ijepa", RESNET])
def test_a_directory_for_transformers_is_read_back_with_the_same_features(name, runs, tmp_path):
    encoder = load_encoder(runs[name], batch_size=5)
    export_encoder(runs[name], "hf", tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    assert loaded.mean == encoder.config.data.augment.mean
    images = "preprocessor_config.json"
    assert (tmp_path / "out" / images).read_text() == (GOLDEN / name / images).read_text()
    np.testing.assert_allclose(loaded.features(pixels(encoder)), encoder(IMAGES), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config", [{"format": "jepa_jax", "model": {}}, {"format": "stablehlo"}, {"architectures": ["ViTModel"]}]
)
def test_an_export_that_is_given_as_a_run_is_named_as_one(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    message = "holds exported or public weights, not a run.*--weights or jepa_jax.weights.load_model"
    with pytest.raises(UserError, match=message):
        load_encoder(tmp_path)
    with pytest.raises(UserError, match=message):
        export_encoder(tmp_path, "hf", tmp_path / "out")
    with pytest.raises(UserError, match=message):
        open_embedder(workdir=str(tmp_path), weights=None)


@pytest.mark.parametrize("name", ["vit", "ijepa", "dinov2", RESNET, "resnet_bottleneck"])
def test_transformers_computes_the_same_with_what_is_exported(name):
    recorded, loaded = np.load(GOLDEN / name / "io.npz"), load_model(GOLDEN / name)
    outputs = np.asarray(loaded.apply(recorded["pixel_values"].transpose(0, 2, 3, 1)))
    if outputs.ndim == 4:
        outputs = outputs.transpose(0, 3, 1, 2)
    np.testing.assert_allclose(outputs, recorded["last_hidden_state"], rtol=1e-5, atol=1e-5)
    # What transformers has read is what is written for this encoder.
    config, tensors = transformers_files(loaded.module, loaded.structure, image_size=loaded.image_size, channels=3)
    assert config == json.loads((GOLDEN / name / "config.json").read_text())
    written = load_tensors(GOLDEN / name)
    assert tensors.keys() == written.keys()
    assert all(tensors[key].tobytes() == written[key].tobytes() for key in written)


@pytest.mark.parametrize("name", ["hf_dinov2_registers", "hf_dinov2_swiglu", "hf_dinov3", "hf_dinov3_plain"])
def test_later_families_are_written_as_they_are_read(name, tmp_path):
    """transformers 5.23 has loaded these files, with the recorded outputs bit for bit."""
    golden, loaded = recorded(name), load_model(WEIGHTS / name)
    config, tensors = transformers_files(loaded.module, loaded.structure, image_size=loaded.image_size, channels=3)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    outputs = load_model(tmp_path).apply(golden["pixel_values"])
    np.testing.assert_allclose(outputs, golden["last_hidden_state"], atol=2e-5)


def load_tensors(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


CLS = {"eval__weights": "target", "eval__pool": "cls"}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny_masked_config("hjepa", eval__pool="grid2"), id="hjepa"),
        pytest.param(tiny_masked_config("mae", **CLS), id="CLS token"),
        pytest.param(tiny_masked_config("mae", model__registers=2, model__mlp="swiglu", **CLS), id="registers"),
        pytest.param(tiny_masked_config("mae", model__positions="rotary", eval__image_size=32), id="rotary, enlarged"),
    ],
)
def test_features_are_traced_for_any_number_of_images(config):
    """As `stablehlo` does: `len` of an array would have to know it."""
    program, (count,) = build_program(config), jax.export.symbolic_shape("b")

    def features(params, stats, images):
        return program.encoder_method.features(program.factory.merge(params, stats), {"image": images})

    state, images = program.factory.abstract, jax.ShapeDtypeStruct((count, *IMAGES.shape[1:]), IMAGES.dtype)
    params, stats = evaluated_variables(state, config.eval.weights)
    assert jax.eval_shape(features, params, stats, images).shape[0] == count


WITHOUT_PACKAGE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jepa_jax", "flax"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Refuse())
import jax.export
import numpy as np

with open(sys.argv[1], "rb") as file:
    encoder = jax.export.deserialize(bytearray(file.read()))
assert encoder.platforms == ("cpu", "cuda"), encoder.platforms
images = np.load(sys.argv[2])
np.savez(sys.argv[3], all=encoder.call(images), one=encoder.call(images[:1]))
assert not {"jepa_jax", "flax"} & set(sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ijepa", RESNET])
def test_stablehlo_runs_for_any_batch_in_a_process_without_this_package(name, runs, tmp_path):
    encoder = load_encoder(runs[name], batch_size=5)
    export_encoder(runs[name], "stablehlo", tmp_path / "out")
    np.save(tmp_path / "images.npy", IMAGES)
    arguments = [tmp_path / "out" / "encoder.stablehlo", tmp_path / "images.npy", tmp_path / "features.npz"]
    subprocess.run([sys.executable, "-c", WITHOUT_PACKAGE, *map(str, arguments)], check=True)
    features, expected = np.load(tmp_path / "features.npz"), encoder(IMAGES)
    np.testing.assert_allclose(features["all"], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(features["one"], expected[:1], rtol=1e-5, atol=1e-5)


def test_the_command_writes_a_card_with_data_recipe_accuracies_and_command(runs, tmp_path, capsys):
    flags = [f"--workdir={runs['resnet_basic']}", "--format=safetensors", f"--output={tmp_path / 'out'}", "--json"]
    assert main(["export", *flags]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["feature_dim"] == 8 and record["files"].keys() == {"model.safetensors", "config.json"}
    card = (tmp_path / "out" / "README.md").read_text()
    for part in (
        "resnet trained with image_jepa on shapes", "\njepa-jax train --config=tiny\n", "| Linear probe | 71.2 % |",
        "| Linear probe, encoder untrained | 40.5 % |", "| Chance | 10.0 % |", "| raw pixels (baseline) | 39.4 % |",
        "load_model", "12 steps of 16 images, 2 epochs of 4,096 images.", "mean [0.",
        "4,096 train images (SHA-256", "Started from random weights",
    ):  # fmt: skip
        assert part in card
    assert "/home/ann" not in card
    assert main(["export", *flags]) == 0  # an earlier export may be replaced


def test_what_cannot_be_exported_is_refused(runs, tmp_path):
    with pytest.raises(UserError, match="--format=onnx: not one of safetensors, hf, stablehlo"):
        export_encoder(runs["ijepa"], "onnx", tmp_path / "out")
    with pytest.raises(UserError, match="transformers has no PatchNet; use --format=safetensors"):
        export_encoder(runs["patchnet"], "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match=r"holds other files \(thesis.txt\)"):
        export_encoder(runs["ijepa"], "hf", tmp_path)
    with pytest.raises(UserError, match="there is no such folder"):
        export_encoder(tmp_path / "nowhere", "hf", tmp_path / "out")
