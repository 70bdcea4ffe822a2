"""Configs: recipes are complete and equal to their snapshots, and every mistake is named with its fix."""

import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict, config_dict

from jepa_jax.base.errors import UserError
from jepa_jax.config import default_config, with_choices
from jepa_jax.config.checks import nearest_key
from jepa_jax.config.flags import parse_config
from jepa_jax.config.recipe import read_recipe, shipped_recipes, summary_of
from jepa_jax.config.resolve import resolve
from jepa_jax.config.schema import config_hash, differing_keys, flatten, nested
from jepa_jax.methods.contract import Method
from jepa_jax.program.config import changed_config, load_config
from tests.tiny import tiny_config

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FOLLOWING = """
from jepa_jax.configs import quickstart

def get_config():
    config = quickstart.get_config()
    config.eval.batch_size = config.data.get_ref("batch_size")
    config.optim.reference_batch = config.data.get_ref("batch_size")
    return config
"""
SNAPSHOTS = json.loads((GOLDEN / "configs.json").read_text())


def test_there_is_a_snapshot_of_every_recipe():
    assert set(SNAPSHOTS) == set(shipped_recipes())


@pytest.mark.parametrize("name, path", shipped_recipes().items(), ids=list(shipped_recipes()))
def test_a_recipe_is_short_equals_its_snapshot_and_takes_other_encoders_and_losses(name, path):
    """A changed default shows here; `python -m tests.config.write_snapshots` writes them anew after review."""
    text, config = path.read_text(), load_config(name)
    assert differing_keys(SNAPSHOTS[name], config) == []
    assert len(text.splitlines()) <= 60 and summary_of(path).endswith(".")
    assert f"--config={name} " in text and json.loads(json.dumps(config.to_dict()))
    if config.method.name == "image_jepa":
        switched = load_config(name, {"method.loss": "infonce", "model.name": "vit_tiny", "optim.name": "sgd"})
        assert switched.method.temperature == 0.2 and not hasattr(switched.method, "num_slices")
        of_a_vit = config.model.patch_size if config.model.name.startswith("vit") else 8
        assert switched.model.patch_size == of_a_vit and not hasattr(switched.model, "stem")
        assert switched.method.projector == config.method.projector
    elif config.model.name.startswith("vit"):
        switched = load_config(name, {"model.name": "vit_small", "optim.name": "sgd"})
        assert switched.model.patch_size == config.model.patch_size
    else:
        switched = load_config(name, {"optim.name": "sgd"})
    assert switched.optim.nesterov is False


def test_a_changed_choice_takes_its_own_defaults():
    """The weight 10 of BCS means nothing to SIGReg, whose lambda lies in 0..1."""
    assert load_config("image_jepa_sigreg").method.sigreg_weight == 10.0
    assert load_config("image_jepa_sigreg", {"method.loss": "sigreg"}).method.sigreg_weight == 0.05


def test_a_default_that_follows_another_key_follows_its_override():
    """The end of weight decay does; the rate stays that of the recipe's batch."""
    config = load_config("cifar10_cpu", {"optim.weight_decay": 0.3, "data.batch_size": 64})
    assert config.optim.weight_decay_end == 0.3 and config.optim.reference_batch == 128


def test_the_former_way_to_start_from_a_recipe_is_refused_with_the_new_one(tmp_path):
    (tmp_path / "mine.py").write_text("def get_config():\n    return dict(base='quickstart', optim=dict(lr=0.5))\n")
    with pytest.raises(UserError, match=r"start from jepa_jax\.configs\.quickstart\.get_config\(\) instead"):
        load_config(str(tmp_path / "mine.py"))


def test_a_reference_of_a_recipe_follows_overrides(tmp_path):
    (tmp_path / "mine.py").write_text(FOLLOWING)
    config = load_config(str(tmp_path / "mine.py"), {"data.batch_size": 32})
    assert (config.eval.batch_size, config.optim.reference_batch) == (32, 32)
    assert config.optim.weight_decay_end == config.optim.weight_decay


def test_placeholders_must_be_filled():
    config = default_config("image_jepa", "resnet10")
    config.optim.lr = config_dict.placeholder(float)
    config.data.dir = config_dict.FieldReference(None, field_type=str, required=True)
    with pytest.raises(UserError) as error:
        load_config(config)
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == ["config.data.dir", "config.optim.lr"]
    config.optim.lr, config.data.dir = 0.5, "data"
    assert load_config(config).optim.lr == 0.5


def test_configs_are_config_dicts_that_others_can_use():
    config = read_recipe("rapid")
    assert isinstance(config, ConfigDict) and config.optim.lr == 0.707
    assert json.loads(config.to_json()) == json.loads(json.dumps(SNAPSHOTS["rapid"]))
    assert config.copy_and_resolve_references().lock().is_locked
    with pytest.raises(TypeError):
        config.optim.lr = "fast"
    byol = with_choices(config, method__name="byol")
    assert "std_weight" not in byol.method and "ema_start" in byol.method and "std_weight" in config.method


def test_the_config_of_a_run_is_read_again(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SNAPSHOTS["quickstart"]))
    assert differing_keys(load_config(str(tmp_path / "config.json")), SNAPSHOTS["quickstart"]) == []


def test_a_patch_larger_than_the_view_is_named():
    with pytest.raises(UserError, match="config.model.patch_size = 64: does not divide the 32-pixel views"):
        load_config("hjepa_cifar10_cpu", {"model.patch_size": 64})


def test_overrides_are_read_as_the_type_of_their_key():
    texts = {"optim.lr": "3", "data.augment.crop.scale": "(0.1, 1)", "eval.untrained": "0", "train.seed": "7"}
    config = load_config("quickstart", texts)
    assert config.optim.lr == 3.0 and isinstance(config.optim.lr, float)
    assert config.data.augment.crop.scale == (0.1, 1.0)
    assert config.eval.untrained is False and config.train.seed == 7
    assert load_config("quickstart", {"method.projector": "64,32"}).method.projector == (64, 32)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("optim__epochs", 0.0, r"config.optim.epochs = 0.0: nothing to train"),
        ("data__batch_size", "many", r"config.data.batch_size = 'many': must be of type int"),
        ("data__batch_size", True, r"config.data.batch_size = True: must be of type int"),
        ("data__batch_size", 1.5, r"config.data.batch_size = 1.5: must be of type int"),
        ("data__pipeline", "torch", r"config.data.pipeline = 'torch': not one of grain, device"),
        ("train__accum_steps", 3, r"config.data.batch_size = 16: not divisible by train.accum_steps = 3"),
        ("train__accum_steps", 16, r"config.train.accum_steps = 16: leaves one image"),
        ("optim__warmup_epochs", 99.0, r"config.optim.warmup_epochs = 99.0: longer than optim.epochs"),
        ("data__augment__crop__scale", (1.0, 0.2), r"config.data.augment.crop.scale = .*swap"),
        ("data__augment__blur__sigma", (0.0, 2.0), r"config.data.augment.blur.sigma = .*must be at least"),
        ("data__augment__mean", (0.5, 0.5), r"config.data.augment.mean = .*needs data.channels = 3 numbers"),
        ("data__augment__flip__probability", 1.5, r"flip.probability = 1.5: must be at least 0 and at most 1"),
        ("optim__lr", float("nan"), r"config.optim.lr = nan: must be finite"),
        ("method__projector", (), r"config.method.projector = \(\): needs at least one"),
        ("method__name", "moco", r"config.method.name = 'moco': not one of image_jepa"),
        ("method__name", "nowhere.byol:Byol", r"config.method.name = .*there is no module nowhere"),
        ("method__name", "json:Byol", r"config.method.name = .*json has no class Byol"),
        ("optim__schedule", [[1]], r"config.optim.schedule = \(\[1\],\): must be of type str"),
        ("mesh__data", 0, r"config.mesh.data = 0: use -1"),
        ("train__seed", 2**40, r"config.train.seed = 1099511627776: must be at least 0 and at most 2147483647"),
        ("profile__trace_steps", "3", r"config.profile.trace_steps = '3': write the first and the last step"),
    ],
)  # fmt: skip
def test_bad_values_are_named_with_the_fix(key, value, message):
    with pytest.raises(UserError, match=message):
        tiny_config(**{key: value})


def test_all_errors_come_in_one_answer():
    with pytest.raises(UserError) as error:
        tiny_config(optim__learning_rate=0.1, data__batchsize=3, train__seed=-1, model__name="resnet99")
    lines = str(error.value).splitlines()
    assert len(lines) == 4 and all(line.startswith("config.") for line in lines)
    with pytest.raises(UserError) as error:
        tiny_config(optim__lr="abc", train__accum_steps=7)
    assert [line.split(" = ")[0] for line in str(error.value).splitlines()] == [
        "config.optim.lr",
        "config.data.batch_size",
    ]


def test_a_key_of_another_choice_names_that_choice():
    with pytest.raises(UserError, match=r"config.method.std_weight: only read with method.loss = vicreg"):
        tiny_config(method__loss="sigreg", method__std_weight=3.0)
    with pytest.raises(UserError, match=r"config.lr: unknown key; did you mean config.optim.lr"):
        load_config("quickstart", {"lr": 3})
    with pytest.raises(UserError, match=r"config.optim: a group of keys"):
        load_config("quickstart", {"optim": 3})


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("optim.learning_rate", "optim.lr"),
        ("data.batchsize", "data.batch_size"),
        ("train.lr", "optim.lr"),
        ("data.workers", "data.num_workers"),
        ("train.batch_size", "data.batch_size"),
        ("optim.wd", "optim.weight_decay"),
        ("train.epochs", "optim.epochs"),
    ],
)
def test_an_unknown_key_suggests_the_right_one(wrong, right):
    assert nearest_key(wrong, flatten(tiny_config())) == right


def test_wildfire_recipes_compute_in_float32_without_a_gpu():
    assert load_config("emberformer").train.precision == "float32"


def test_colour_needs_three_channels():
    grey = {"data__channels": 1, "data__augment__mean": (0.5,), "data__augment__std": (0.2,)}
    with pytest.raises(UserError) as error:
        tiny_config(**grey, data__augment__jitter__probability=0.8, data__augment__grayscale__probability=0.2)
    assert "jitter.saturation" in str(error.value) and "grayscale.probability" in str(error.value)
    assert tiny_config(**grey).data.channels == 1


def test_a_config_of_an_earlier_version_is_read_without_its_unread_keys():
    old = flatten(tiny_config()) | {"method.temperature": 0.2, "optim.momentum": 0.9}
    with pytest.raises(UserError, match="method.temperature: only read with method.loss = infonce"):
        resolve(old)
    assert differing_keys(resolve(nested(old), lenient=True), tiny_config()) == []


def test_a_recipe_may_leave_keys_out_and_take_an_argument(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from ml_collections import ConfigDict\ndef get_config(lr='0.5'):\n    return ConfigDict(dict("
                    "method=dict(name='mae'), model=dict(name='vit_tiny'), optim=dict(lr=float(lr))))\n")  # fmt: skip
    assert load_config(str(path)).optim.lr == 0.5
    assert load_config(f"{path}:0.25").optim.lr == 0.25
    assert isinstance(ConfigDict(load_config(str(path)).to_dict()).optim.lr, float)


@pytest.mark.parametrize(
    "content, message",
    [("x = (", "cannot be loaded"), ("def get_config(): return 3", "return an ml_collections.ConfigDict")],
)
def test_a_broken_recipe_is_named(tmp_path, content, message):
    path = tmp_path / "mine.py"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_config(str(path))
    with pytest.raises(UserError, match="no such file or shipped config; the shipped ones are .*did you mean rapid"):
        load_config("rapidd")


def test_differing_keys_list_both_values():
    old = tiny_config()
    new = changed_config(old, {"optim.lr": 0.5})
    assert differing_keys(old.to_dict(), new.to_dict()) == ["config.optim.lr: 0.002 -> 0.5"]
    assert config_hash(old) != config_hash(new)


@settings(max_examples=20)
@given(st.dictionaries(st.sampled_from("abc"), st.one_of(st.integers(), st.lists(st.integers(), max_size=3))))
def test_a_config_read_back_from_json_is_equal(values):
    config = {"group": values}
    assert differing_keys(config, json.loads(json.dumps(config))) == []


class WithoutEncoder(Method):
    """A method that names no encoder and has no features."""


def test_a_method_without_features_needs_no_encoder():
    values = {"method": {"name": f"{__name__}:WithoutEncoder"}, "data": {"source": "shapes", "num_train": 8}}
    config = resolve(values)
    assert config.model.name == "" and config.init_from == ""
    assert default_config(f"{__name__}:WithoutEncoder", "").model.name == ""
    with pytest.raises(UserError, match=r"config.model.name = '': not one of"):
        resolve({"method": {"name": "byol"}, "data": {"source": "shapes"}})


def test_another_method_says_which_values_it_drops():
    said = []
    flags = ["--config.method.name=byol", "--config.method.projector=64,32"]
    config = parse_config("quickstart", flags, said.append)
    recipe = read_recipe("quickstart")
    assert config.method.name == "byol" and config.method.projector == (64, 32)
    (sentence,) = said
    assert sentence.startswith("config.method.name = byol: drops values that image_jepa had: method.")
    assert f"method.loss = {recipe.method.loss}" in sentence and "projector" not in sentence
    parse_config("quickstart", ["--config.optim.lr=0.1"], said.append)
    assert len(said) == 1
