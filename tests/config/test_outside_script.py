"""Recipes in the programs of others: plain `config_flags`, then `jepa_jax.train`; and the same flags in ours."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jepa_jax.cli.flags import config_from
from jepa_jax.cli.main import find_command
from jepa_jax.config.schema import differing_keys
from tests.flags import FAST_TO_COMPILE
from tests.tiny import TINY

ROOT = pathlib.Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "coming_from.md"
_, SCRIPT = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
RECIPE = """
from jepa_jax.config import with_choices
from jepa_jax.configs import quickstart

def get_config():
    config = with_choices(quickstart.get_config(), model__name="patchnet")
    config.update_from_flattened_dict({tiny})
    return config
"""
SHORT = {"data.num_train": 64, "data.num_test": 16, "train.max_steps": 3}
SHORT |= {"eval.untrained": False, "profile.enabled": False}


def train_outside(folder, recipe, **overrides):
    """Runs an absl program that knows nothing of our flags; returns the summary and the config of its run."""
    (folder / "script.py").write_text(SCRIPT)
    flags = [f"--config.{name}={value}" for name, value in overrides.items()]
    command = [sys.executable, folder / "script.py", f"--config={recipe}", f"--workdir={folder / 'run'}", *flags]
    environment = os.environ | {"XLA_FLAGS": FAST_TO_COMPILE}  # one device: less to compile
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads((folder / "run" / name).read_text()) for name in ("summary.json", "config.json")]


def test_a_script_with_config_flags_trains_a_recipe(tmp_path):
    tiny = {name: value for name, value in (TINY | SHORT).items() if name not in ("model.name", "train.max_steps")}
    (tmp_path / "mine.py").write_text(RECIPE.replace("{tiny}", repr(tiny)))
    overrides = {"train.max_steps": 3, "optim.lr": 0.25, "optim.weight_decay": 0.5}
    summary, config = train_outside(tmp_path, tmp_path / "mine.py", **overrides)
    assert (summary["steps"], config["optim"]["lr"], config["optim"]["weight_decay"]) == (3, 0.25, 0.5)
    assert config["model"]["name"] == "patchnet"


@pytest.mark.slow
def test_a_script_with_config_flags_trains_a_shipped_recipe(tmp_path):
    small = {"data.source": "shapes", "data.batch_size": 16, "model.width": 4, "method.projector": "(16,16)"}
    summary, config = train_outside(tmp_path, "configs/rapid.py", **SHORT | small | {"optim.lr": 0.25})
    assert (summary["steps"], config["optim"]["lr"], config["model"]["name"]) == (3, 0.25, "resnet18")


def test_scripts_and_the_command_resolve_the_same_config():
    """`scripts/train.py` calls the same command; only the name of the recipe is written otherwise."""
    script = (ROOT / "scripts" / "train.py").read_text()
    assert "from jepa_jax.cli.main import program" in script and 'program("train")' in script
    flags = ["--config.optim.lr=1e-3", "--workdir=W"]
    one, other = (
        config_from(find_command("train").parse([f"--config={recipe}", *flags]))
        for recipe in (str(ROOT / "configs" / "quickstart.py"), "quickstart")
    )
    assert differing_keys(one, other) == [] and one.optim.lr == 1e-3
