"""Models of other libraries: outputs as recorded there, and one error for each file that does not fit."""

import contextlib
import hashlib
import json
import pickle
import random
import shutil
import sys
import types

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jepa_jax.base.errors import UserError
from jepa_jax.weights import load_model
from tests.weights.golden import SEGFORMER, WEIGHTS, recorded, write_in_parts

VITS = {
    "hf_vit": "last_hidden_state",
    "hf_ijepa": "last_hidden_state",
    "hf_dinov2": "last_hidden_state",
    "hf_dinov2_registers": "last_hidden_state",
    "hf_dinov2_swiglu": "last_hidden_state",
    "hf_dinov3": "last_hidden_state",
    "hf_dinov3_plain": "last_hidden_state",
    "timm_vit": "tokens",
}
RESNETS = ("timm_resnet_basic", "timm_resnet_bottleneck")


@pytest.mark.parametrize("name", VITS)
def test_tokens_of_vits_equal_those_of_their_library(name):
    model, golden = load_model(WEIGHTS / name), recorded(name)
    np.testing.assert_allclose(model.apply(golden["pixel_values"]), golden[VITS[name]], atol=2e-5)


@pytest.mark.parametrize("name", [name for name in VITS if "dinov" in name] + ["hf_vit"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_positions_are_resized_as_transformers_does(name, size):
    golden = recorded(name, "io_resized.npz" if name in ("hf_vit", "hf_dinov2") else "io.npz")
    tokens = load_model(WEIGHTS / name).apply(golden[f"pixel_values_{size}"])
    np.testing.assert_allclose(tokens, golden[f"last_hidden_state_{size}"], atol=2e-5)


@pytest.mark.parametrize("name", RESNETS)
def test_maps_and_features_of_resnets_equal_those_of_timm(name):
    model, golden = load_model(WEIGHTS / name), recorded(name)
    last_map = model.apply(golden["pixel_values"])
    np.testing.assert_allclose(last_map, golden["map"], atol=2e-5)
    np.testing.assert_allclose(np.mean(last_map, (1, 2)), golden["features"], atol=2e-5)


def test_a_masked_autoencoder_gives_logits_mask_and_loss_of_the_given_noise():
    model, golden = load_model(WEIGHTS / "hf_vitmae"), recorded("hf_vitmae")
    outputs = model.apply(golden["pixel_values"], golden["noise"])
    for name in ("logits", "mask", "ids_restore", "loss"):
        np.testing.assert_allclose(getattr(outputs, name), golden[name], atol=2e-5)


def test_names_of_a_decoder_from_earlier_versions_are_known(tmp_path):
    tensors = load_file(WEIGHTS / "hf_vitmae" / "model.safetensors")
    old = {name.replace("decoder.decoder_encoder.layer.", "decoder.decoder_layers."): t for name, t in tensors.items()}
    assert old.keys() != tensors.keys()
    assert variables(load_model(changed(tmp_path, "hf_vitmae", old))) == variables(load_model(WEIGHTS / "hf_vitmae"))


def test_a_segformer_has_no_features():
    # tests/projects/wildfire/models/test_segformer.py compares its logits; compiling them again would take long.
    loaded = load_model(SEGFORMER)
    with pytest.raises(UserError, match="logits per pixel, not features"):
        loaded.features(np.zeros((1, 64, 64, 3), np.float32))


def test_a_file_without_config_is_enough_for_a_resnet_and_tells_what_a_vit_lacks(tmp_path):
    alone = tmp_path / "model.safetensors"
    shutil.copy(WEIGHTS / "timm_resnet_basic" / "model.safetensors", alone)
    assert variables(load_model(alone)) == variables(load_model(WEIGHTS / "timm_resnet_basic"))
    shutil.copy(WEIGHTS / "timm_vit" / "model.safetensors", alone)
    with pytest.raises(UserError, match="neither num_heads nor a known architecture"):
        load_model(alone)
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 4}))
    model, golden = load_model(alone), recorded("timm_vit")
    np.testing.assert_allclose(model.apply(golden["pixel_values"]), golden["tokens"], atol=2e-5)


def test_a_model_in_several_files_is_read_through_its_index(tmp_path):
    write_in_parts(tmp_path, "hf_vit")
    assert variables(load_model(tmp_path)) == variables(load_model(WEIGHTS / "hf_vit"))


SOME = {  # a tensor of each family, and what it is renamed to
    "hf_vit": "encoder.layer.1.attention.attention.key.weight",
    "hf_ijepa": "embeddings.patch_embeddings.projection.weight",
    "hf_dinov2": "encoder.layer.0.layer_scale1.lambda1",
    "hf_dinov2_registers": "embeddings.register_tokens",
    "hf_dinov2_swiglu": "encoder.layer.1.mlp.weights_in.bias",
    "hf_dinov3": "layer.1.attention.v_proj.bias",
    "hf_vitmae": "decoder.decoder_pos_embed",
    "hf_segformer": "segformer.encoder.block.0.0.mlp.dense1.weight",
    "timm_vit": "blocks.2.attn.qkv.weight",
    "timm_resnet_basic": "layer3.0.conv1.weight",
    "timm_resnet_bottleneck": "layer2.1.bn3.running_var",
}


@pytest.mark.parametrize("name", SOME)
def test_renamed_misshapen_and_missing_tensors_are_named(name, tmp_path):
    tensors, wrong = load_file(WEIGHTS / name / "model.safetensors"), SOME[name]
    value = tensors.pop(wrong)
    refused(tmp_path, name, tensors, f"{wrong} is missing")
    refused(tmp_path, name, tensors | {f"{wrong}_": value}, f"{wrong}_ is left over")
    misshapen = np.zeros((*value.shape[:-1], value.shape[-1] + 1), np.float32)
    refused(tmp_path, name, tensors | {wrong: misshapen}, f"{wrong} has shape {list(misshapen.shape)}")


def test_a_pickle_and_a_truncated_file_are_refused(tmp_path):
    content = (WEIGHTS / "hf_vit" / "model.safetensors").read_bytes()
    shutil.copy(WEIGHTS / "hf_vit" / "config.json", tmp_path)
    for wrong in (pickle.dumps({"a": 1}), content[:1000], content[:-100], b""):
        (tmp_path / "model.safetensors").write_bytes(wrong)
        with pytest.raises(UserError, match="model.safetensors: not a complete safetensors file"):
            load_model(tmp_path)


def test_configs_that_cannot_be_built_are_refused(tmp_path):
    tensors = load_file(WEIGHTS / "hf_vit" / "model.safetensors")
    folder = changed(tmp_path, "hf_vit", tensors)
    saved = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"architectures": ["BertModel"]}, "architectures = ..BertModel..; supported are ViTModel"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported; it must be 'gelu'"),
        ({"patch_size": [8, 4]}, "not square"),
    ):
        (folder / "config.json").write_text(json.dumps(saved | change))
        with pytest.raises(UserError, match=message):
            load_model(folder)
    del saved["hidden_size"]
    (folder / "config.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match="config.json has no hidden_size"):
        load_model(folder)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("hf_vit", {"num_attention_heads": 5}, "num_attention_heads = 5 does not divide the width of 48"),
        ("hf_vit", {"hidden_size": None}, "config.json has no hidden_size"),
        ("hf_vitmae", {"mask_ratio": None}, "config.json has no mask_ratio"),
        ("hf_vitmae", {"norm_pix_loss": None}, "config.json has no norm_pix_loss"),
        ("hf_vitmae", {"decoder_num_attention_heads": 5}, "decoder_num_attention_heads = 5 does not divide"),
        ("hf_dinov2", {"mlp_ratio": None}, "config.json has no mlp_ratio"),
        ("timm_vit", {"num_heads": 5}, "num_heads = 5 does not divide the width of 48"),
        ("timm_vit", {"model_args": {"act_layer": "quick_gelu"}}, "act_layer = 'quick_gelu' is not supported"),
        ("timm_vit", {"model_args": 3}, "model_args = 3 is not an object"),
        ("timm_vit", {"pretrained_cfg": "x"}, "pretrained_cfg = 'x' is not an object"),
        ("timm_vit", {"architecture": "vit_base_patch16_rpn_224"}, "architecture = 'vit_base_patch16_rpn_224' is not"),
        ("timm_vit", {"architecture": "vit_base_patch16_clip_quickgelu_224"}, "quickgelu_224' is not one that is"),
        ("timm_resnet_basic", {"act_layer": "silu"}, "act_layer = 'silu' is not supported; it must be 'relu'"),
        ("timm_resnet_basic", {"model_args": {"aa_layer": "blurpool"}}, "aa_layer = 'blurpool' is not supported"),
        ("timm_resnet_basic", {"architecture": "resnetblur18"}, "architecture = 'resnetblur18' is not one that is"),
        ("timm_resnet_basic", {"architecture": "resnetaa18"}, "architecture = 'resnetaa18' is not one that is known"),
    ],
)
def test_incomplete_configs_and_models_that_compute_something_else_are_refused(name, change, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load_model(with_config(tmp_path, name, change))


HOSTILE = (None, -1, 0, 2**31, 1e30, float("nan"), True, "x", "9" * 5000, [], [1, 2], {}, {"a": None}, [[]], "\ud800")


@pytest.mark.parametrize("name", [*VITS, "hf_vitmae", *RESNETS])
def test_no_value_in_a_config_raises_anything_but_a_user_error(name, tmp_path):
    config = json.loads((WEIGHTS / name / "config.json").read_text())
    chosen = random.Random(name).sample([(key, value) for key in [*config, "pretrained_cfg"] for value in HOSTILE], 8)
    for number, (key, value) in enumerate(chosen):
        with contextlib.suppress(UserError):
            load_model(with_config(tmp_path / str(number), name, {key: value}))


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("hf_vit", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: there are"),
        ("timm_resnet_basic", {"layers": [1, 1, 1, 10**9]}, r"layers = \[1, 1, 1, 1000000000\]: there are"),
        ("hf_vit", {"image_size": 2**20}, "image_size = 1048576: more than 16,384 pixels"),
        ("timm_vit", {"pretrained_cfg": {"mean": [0, 0, 0], "std": [1, 0, 1]}}, "do not normalise images"),
        ("hf_vit", {"hidden_size": "x"}, "config.json: describes no model"),
    ],
)
def test_configs_that_would_take_all_time_or_memory_are_refused(name, change, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load_model(with_config(tmp_path, name, change))


def test_weights_that_are_not_those_of_their_card_are_refused(tmp_path):
    for file in ("config.json", "model.safetensors"):
        shutil.copy(WEIGHTS / "timm_resnet_basic" / file, tmp_path)
    digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    (tmp_path / "README.md").write_text(f"# Card\n\n- SHA-256 of model.safetensors: {digest}\n")
    load_model(tmp_path)
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model.safetensors: is not the file that README.md describes"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "name, architecture", [("timm_vit", "deit3_small_patch16_224"), ("timm_resnet_basic", "tv_resnet34")]
)
def test_plain_architectures_and_null_settings_of_timm_are_taken(name, architecture, tmp_path):
    nulls = {"pretrained_cfg": None, "model_args": None, "act_layer": None, "aa_layer": None}
    model = load_model(with_config(tmp_path, name, nulls | {"architecture": architecture}))
    assert variables(model) == variables(load_model(WEIGHTS / name)) and model.mean == (0.485, 0.456, 0.406)


def test_wrong_pixels_and_wrong_places_are_refused(monkeypatch):
    model = load_model(WEIGHTS / "hf_ijepa")
    for pixels in (np.zeros((1, 3, 32, 32), np.float32), np.zeros((1, 32, 32, 3), np.uint8), np.zeros((32, 32, 3))):
        with pytest.raises(UserError, match=r"takes normalised float32 \[B, height, width, 3\]"):
            model.apply(pixels)
    with pytest.raises(UserError, match="multiple of 8 pixels"):
        model.apply(np.zeros((1, 32, 40, 3), np.float32))
    with pytest.raises(
        UserError, match="no such file or folder; for weights of the Hugging Face Hub write hub:OWNER/NAME"
    ):
        load_model("owner/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"needs the package huggingface_hub; pip install 'jepa_jax\[hub\]'"):
        load_model("hub:owner/name")


def test_a_name_on_the_hub_is_downloaded_by_huggingface_hub_without_pickles(monkeypatch):
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        if name == "owner/absent":
            raise OSError("no route to the Hub\nand much more")
        return str(WEIGHTS / "hf_vit")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    assert load_model("hub:owner/vit").origin == WEIGHTS / "hf_vit" / "model.safetensors"
    assert asked == [("owner/vit", ["*.json", "*.safetensors"])]
    with pytest.raises(UserError, match=r"hub:owner/absent: cannot be downloaded \(OSError: no route to the Hub\);"):
        load_model("hub:owner/absent")


def changed(folder, name, tensors):
    """Writes a model with other tensors; returns its folder."""
    shutil.copy(WEIGHTS / name / "config.json", folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_config(folder, name, change):
    """Writes a model with other values in its config.json; returns its folder."""
    folder.mkdir(exist_ok=True)
    shutil.copy(WEIGHTS / name / "model.safetensors", folder)
    saved = json.loads((WEIGHTS / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | change))
    return folder


def refused(folder, name, tensors, message):
    with pytest.raises(UserError) as caught:
        load_model(changed(folder, name, tensors))
    assert message in str(caught.value) and str(caught.value).startswith(f"{folder}/model.safetensors: ")


def variables(model):
    """Returns the content of every variable, comparable."""
    state = nnx.to_flat_state(nnx.state(model.module))
    return {path: np.asarray(jax.device_get(variable[...])).tobytes() for path, variable in state}
