"""`tiny_config` as a recipe, for tests that start the command."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from tests.tiny import tiny_config


def get_config() -> dict:
    return tiny_config(train__checkpoint_every_steps=2, optim__epochs=8.0).to_dict()
