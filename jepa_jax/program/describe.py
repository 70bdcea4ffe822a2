"""What a config describes: its parameters, its cost an image and its length, without training."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.config.schema import validate
from jepa_jax.data.sources import open_source
from jepa_jax.models.patchnet import Fixed
from jepa_jax.program.build import Program, build_program
from jepa_jax.program.flops import count_flops
from jepa_jax.program.step import TrainState
from jepa_jax.runtime.mesh import make_mesh

# Sizes of sets whose files need not be there to describe a run on them.
KNOWN_SIZES = {
    "cifar10": (50_000, 10),
    "tfds:cifar10": (50_000, 10),
    "tfds:cifar100": (50_000, 100),
    "tfds:stl10": (5_000, 10),
    "tfds:imagenet2012": (1_281_167, 1000),
}


def describe(config: Any) -> dict[str, Any]:
    """Parameters (by module, total, trainable), operations an image and steps of a run."""
    validate(config)
    num_train, num_classes, found = data_size(config.data)
    batch = abstract_batch(config.data)
    program = build_program(
        config, num_train=num_train, num_classes=num_classes, sample=batch["image"], mesh=make_mesh(1, 1)
    )
    abstract = program.factory.abstract
    params = abstract.params["model"]
    return {
        "params_by_module": parameter_table(params),
        "params_total": count(params) + count(abstract.target) + fixed_parameters(program),
        "params_trainable": count(params),
        "params_probe": count(abstract.params["probe"]),
        "optimizer_bytes": num_bytes(abstract.opt_state),
        "flops_per_image": count_flops(program.train_step, abstract, batch) / config.data.batch_size,
        "feature_dim": feature_dim(abstract),
        "images_per_epoch": num_train,
        "data_found": found,
        "steps_per_epoch": program.length.steps_per_epoch,
        "steps_total": program.length.total_steps,
    }


def abstract_batch(data: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of one batch."""
    count, size = data.batch_size, data.image_size
    return {
        "image": jax.ShapeDtypeStruct((count, size, size, 3), np.uint8),
        "label": jax.ShapeDtypeStruct((count,), np.int32),
    }


def data_size(data: Any) -> tuple[int, int, bool]:
    """Train images, classes, and whether the files say so; when they are not there, what is known of the set counts."""
    try:
        source = open_source(data, "train")
        return len(source), len(source.classes), True
    except UserError:
        if data.source not in KNOWN_SIZES:
            raise
        images, classes = KNOWN_SIZES[data.source]
        return data.num_train or images, classes, False


def parameter_table(params: Any) -> dict[str, int]:
    """Parameters of each module, two levels deep, in the order of the tree."""
    table: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = jax.tree_util.keystr(path[: 3 if len(path) > 3 else len(path) - 1], simple=True, separator=".")
        table[name] = table.get(name, 0) + leaf.size
    return table


def fixed_parameters(program: Program) -> int:
    """Numbers of the model that are neither trained nor statistics, such as whitening filters."""
    model = nnx.merge(
        program.factory.graphdef, program.factory.abstract.params["model"], program.factory.abstract.stats
    )
    return count(nnx.state(model, Fixed))


def count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def feature_dim(state: TrainState) -> int:
    return state.params["probe"]["kernel"].shape[0]
