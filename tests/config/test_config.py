"""Configs: every shipped one is complete, and every mistake is named with its fix."""

import importlib.util
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from jepa_jax.base.errors import UserError
from jepa_jax.config import schema as configs
from tests.tiny import set_key, tiny_config

SHIPPED = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("[a-z]*.py"))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_configs_are_complete_and_say_how_to_run_them(path):
    module = load(path)
    configs.validate(module.get_config())
    assert f"--config=configs/{path.name}" in module.__doc__


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("optim__epochs", 0.0, r"config.optim.epochs = 0.0: nothing to train"),
        ("data__batch_size", "64", r"config.data.batch_size = '64': must be of type int"),
        ("data__batch_size", True, r"config.data.batch_size = True: must be of type int"),
        ("data__pipeline", "torch", r"config.data.pipeline = 'torch': not one of grain, device"),
        ("train__accum_steps", 3, r"config.data.batch_size = 16: not divisible by train.accum_steps = 3"),
        ("train__accum_steps", 16, r"config.train.accum_steps = 16: leaves one image"),
        ("optim__warmup_epochs", 99.0, r"config.optim.warmup_epochs = 99.0: longer than optim.epochs"),
        ("data__augment__crop__scale", (1.0, 0.2), r"config.data.augment.crop.scale = .*swap"),
        ("data__augment__mean", (0.5, 0.5), r"config.data.augment.mean = .*needs 3 numbers"),
        (
            "data__augment__flip__probability",
            1.5,
            r"config.data.augment.flip.probability = 1.5: must be between 0 and 1",
        ),
        ("optim__lr", float("nan"), r"config.optim.lr = nan: must be finite"),
        ("method__projector", (), r"config.method.projector = \(\): needs at least one"),
        ("method__name", "simclr", r"config.method.name = 'simclr': not one of image_jepa"),
        ("mesh__data", 0, r"config.mesh.data = 0: use -1"),
    ],
)  # fmt: skip
def test_bad_values_are_named_with_the_fix(key, value, message):
    config = tiny_config()
    config = ConfigDict(config.to_dict(), type_safe=False)
    set_key(config, key, value)
    with pytest.raises(UserError, match=message):
        configs.validate(config)


def test_an_unknown_key_suggests_the_right_one():
    config = tiny_config()
    config.optim.learning_rate = 0.1
    with pytest.raises(UserError, match=r"config.optim.learning_rate: unknown key"):
        configs.validate(config)
    config = tiny_config()
    config.data.batchsize = 3
    with pytest.raises(UserError, match=r"did you mean config.data.batch_size"):
        configs.validate(config)


def test_a_missing_key_is_named():
    config = tiny_config()
    del config.train.seed
    with pytest.raises(UserError, match=r"config.train.seed: missing"):
        configs.validate(config)


def test_differing_keys_list_both_values():
    old, new = tiny_config(), tiny_config(optim__lr=0.5)
    assert configs.differing_keys(old.to_dict(), new.to_dict()) == ["config.optim.lr: 0.002 -> 0.5"]
    assert configs.config_hash(old) != configs.config_hash(new)


@settings(deadline=None, max_examples=20)
@given(st.dictionaries(st.sampled_from("abc"), st.one_of(st.integers(), st.lists(st.integers(), max_size=3))))
def test_a_config_read_back_from_json_is_equal(values):
    import json

    config = {"group": values}
    assert configs.differing_keys(config, json.loads(json.dumps(config))) == []
