"""Recipes: the sizes that they list beside their config, and configs of runs in their place."""

import json

import pytest

import jepa_jax
from jepa_jax.base import machine
from jepa_jax.base.errors import UserError
from jepa_jax.config.recipe import LadderStep, assume_gpus, by_machine, read_ladder, read_recipe
from jepa_jax.config.schema import flatten
from jepa_jax.program.config import changed_config, load_config
from tests.tiny import tiny_config

RECIPE = """
LADDER = (("small", {}, 2.7), ("large", {"data.batch_size": 32}, (12, 14)), ("wide", {"model.width": 96}))


def get_config(name="none"):
    return {"method": {"name": "image_jepa"}, "model": {"name": "resnet10"}, "data": {"dir": name}}
"""


def test_a_ladder_has_steps_with_one_claim_a_range_or_none(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(RECIPE)
    assert read_ladder(str(path)) == [
        LadderStep("small", {}, (2.7,)),
        LadderStep("large", {"data.batch_size": 32}, (12.0, 14.0)),
        LadderStep("wide", {"model.width": 96}, ()),
    ]
    assert read_ladder(f"{path}:argument") == read_ladder(str(path))
    assert read_recipe(f"{path}:argument").data.dir == "argument"


def test_recipes_by_machine_follow_the_driver_and_not_its_tools(tmp_path, monkeypatch):
    tool, driver = tmp_path / "nvidia-smi", tmp_path / "nvidiactl"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "DRIVER_FILES", (str(driver),))
    monkeypatch.delenv("JAX_PLATFORMS")
    assert by_machine("gpu", "cpu") == "cpu"
    driver.touch()
    assert by_machine("gpu", "cpu") == "gpu"
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert by_machine("gpu", "cpu") == "cpu"
    with assume_gpus():
        assert by_machine("gpu", "cpu") == "gpu"
    assert by_machine("gpu", "cpu") == "cpu"


def test_a_recipe_without_a_ladder_has_an_empty_one():
    assert read_ladder("rapid") == []


@pytest.mark.parametrize("ladder", ["3", "[3]", "[('small', {}, 'much')]", "[('small', 5)]", "[('a', {}, 1, 2)]"])
def test_a_ladder_of_another_form_is_refused_with_the_form(tmp_path, ladder):
    path = tmp_path / "mine.py"
    path.write_text(f"LADDER = {ladder}\n\ndef get_config():\n    return {{}}\n")
    with pytest.raises(UserError, match=r"mine.py: LADDER .*write a list of \(name, \{key: value\}\)"):
        read_ladder(str(path))


def test_a_file_that_is_no_python_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("{}")
    with pytest.raises(UserError, match=r"config\.yaml: no \.py file"):
        read_recipe(str(path))


def test_the_config_of_a_run_is_a_recipe(tmp_path):
    """By the folder or its config.json, also if an earlier version wrote a key that is no longer read."""
    config = tiny_config(optim__lr=0.25, method__loss="sigreg")
    stored = config.to_dict()
    stored["train"]["forgotten"] = 1
    (tmp_path / "config.json").write_text(json.dumps(stored))
    for reference in (str(tmp_path), str(tmp_path / "config.json")):
        assert load_config(reference) == config
        assert load_config(reference, {"optim.lr": 0.5}) == changed_config(config, {"optim.lr": 0.5})
    assert flatten(jepa_jax.get_config(tmp_path)) == flatten(jepa_jax.get_config(config.to_dict())) == flatten(config)
