"""Writes the resolved recipes that `test_config` compares with."""

import json
import pathlib

from jepa_jax.config.recipe import shipped_recipes
from jepa_jax.program.config import load_config

if __name__ == "__main__":
    configs = {name: load_config(name).to_dict() for name in shipped_recipes()}
    (pathlib.Path(__file__).parents[1] / "golden" / "configs.json").write_text(json.dumps(configs, indent=1) + "\n")
