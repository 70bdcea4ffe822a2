"""Three steps of one recipe per method give the numbers that they gave when they were recorded."""

import json
import pathlib

import pytest

from jepa_jax.data.pipeline import train_batches
from jepa_jax.data.sources import open_source
from jepa_jax.program.build import build_program, initial_sample
from jepa_jax.program.config import load_config
from jepa_jax.runtime.mesh import batch_sharding, make_mesh

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "steps.json").read_text())
SMALL = {
    "data.source": "shapes", "data.dir": "", "data.num_train": 48, "data.num_test": 16, "data.batch_size": 16,
    "data.num_workers": 0, "optim.warmup_epochs": 0.0, "train.max_steps": 3,
}  # fmt: skip


# What the numbers of a recipe were recorded with, where it has changed since, or where they are steadier: with seed 0
# a value lies so close to a threshold that the order of additions decides about it.
RECORDED = {
    "quickstart": {"train.seed": 1},
    "simsiam_quickstart": {"train.seed": 2},
    "ijepa_cifar10": {"model.embedding": "linear"},  # whitened patches take eigenvectors, which depend on the machine
    "hjepa_cifar10_cpu": {
        "method.level_weights": (1.0, 0.5, 0.25), "method.mask.target_scale": (0.15, 0.25),
        "method.mask.min_context": 10, "model.width": 64, "model.depth": 3, "model.heads": 2, "model.patch_size": 4,
        "model.cls_token": True, "model.embedding": "linear", "optim.weight_decay_end": 0.04, "eval.pool": "mean",
    },
}  # fmt: skip
FAST = ("quickstart",)
TOLERANCE = 1e-3  # relative; versions of XLA add in different orders, which moved the length of a gradient by 4e-4


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in GOLDEN]
)
def test_three_steps_give_the_same_numbers(name):
    config = load_config(name, SMALL | RECORDED.get(name, {}))
    mesh = make_mesh(1, 1)
    source = open_source(config.data, "train")
    sample = initial_sample(source)
    program = build_program(config, num_train=48, num_classes=len(source.classes), sample=sample, mesh=mesh)
    state = program.factory.create(config.train.seed, sample)
    with train_batches(config.data, source, seed=config.train.seed, sharding=batch_sharding(mesh)) as batches:
        for expected in GOLDEN[name]:
            state, metrics = program.train_step(state, next(batches)[0])
            found = {key: float(value) for key, value in metrics.items()}
            assert found == pytest.approx(expected, rel=TOLERANCE, abs=1e-6)
