"""Small configs of world models, for tests."""

import dataclasses
from typing import Any

from jepa_jax.config.groups import Config, DataConfig
from jepa_jax.config.recipe import read_recipe
from jepa_jax.program.config import load_config


def rooms_data(**changes: Any) -> DataConfig:
    """Returns the `data` group of a small set of two rooms."""
    data = DataConfig(
        source="two_rooms", image_size=33, channels=2, num_train=256, num_test=64, max_frames=5, frame_stride=4
    )
    return dataclasses.replace(data, **changes)


def rooms_config(**changes: Any) -> Config:
    """Returns a config of three steps in two rooms; `changes` are keys with "." written "__"."""
    tiny = dict(
        data__num_train=64, data__num_test=32, data__batch_size=16, data__validation=0.25, data__max_frames=5,
        method__unroll=3, method__latent_width=8, model__widths=(16,), mesh__data=1, train__max_steps=3,
        train__checkpoint_every_steps=0, optim__warmup_epochs=0.0, log__every_steps=1, log__tensorboard=False,
        profile__enabled=False, method__control__episodes=4, method__control__horizon=3, method__control__samples=8,
        method__control__iterations=2, method__control__elites=3, method__control__executed=3, eval__batch_size=64,
    )  # fmt: skip
    recipe = read_recipe("two_rooms_cpu")
    return load_config(recipe, {name.replace("__", "."): value for name, value in (tiny | changes).items()})
