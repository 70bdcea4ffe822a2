"""Small training steps of every method, as recipes make them, on synthetic images."""

from typing import Any, NamedTuple

import numpy as np

from jepa_jax.config.groups import Config
from jepa_jax.data.sources import open_source
from jepa_jax.program.build import Program, build_program
from jepa_jax.program.config import load_config
from jepa_jax.runtime.mesh import make_mesh

BATCH_SIZE = 32
SHARED = {
    "data.source": "shapes", "data.dir": "", "data.image_size": 32, "data.num_train": 64, "data.num_test": 32,
    "data.batch_size": BATCH_SIZE, "eval.batch_size": BATCH_SIZE, "optim.reference_batch": BATCH_SIZE,
    "optim.epochs": 2.0, "optim.warmup_epochs": 0.0, "optim.name": "sgd", "optim.lr": 0.05, "mesh.data": 1,
}  # fmt: skip
SMALL_VIT = {"model.width": 64, "model.depth": 2, "model.heads": 2, "model.patch_size": 4}
NARROW = {"model.width": 8}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {  # by method
    "image_jepa": ("quickstart", NARROW),
    "ijepa": ("ijepa_cifar10", SMALL_VIT | {"model.embedding": "linear"}),
    "hjepa": ("hjepa_cifar10_cpu", SMALL_VIT | {"model.embedding": "linear"}),
    "mae": ("mae_quickstart", SMALL_VIT),
    "dino": ("dino_quickstart", NARROW),
    "byol": ("byol_quickstart", NARROW),
    "simsiam": ("simsiam_quickstart", NARROW),
    "barlow_twins": ("barlow_quickstart", NARROW),
}


class SmallStep(NamedTuple):
    """A program with a batch and its initial state."""

    config: Config
    program: Program
    batch: dict[str, np.ndarray]
    state: Any


def make_step(method: str, devices: list[Any], **changes: Any) -> SmallStep:
    """Returns the small step of a method on some devices; changes are config keys with "." written "__"."""
    recipe, own = RECIPES[method]
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    config = load_config(recipe, SHARED | own | changed)
    source = open_source(config.data, "train")
    batch = source.batch(np.arange(config.data.batch_size))
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, devices)
    program = build_program(
        config, num_train=len(source), num_classes=len(source.classes), sample=batch, mesh=mesh
    )  # fmt: skip
    batch = {name: batch[name] for name in source.spec}
    return SmallStep(config, program, batch, program.factory.create(0, batch))
