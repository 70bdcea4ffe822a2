"""What a config describes: its parameters, its cost an image and its length, without training."""

from typing import Any

import jax
from flax import nnx


from jepa_jax.data.contract import abstract_batch
from jepa_jax.data.facts import data_facts
from jepa_jax.models.patchnet import Fixed
from jepa_jax.program.build import Program, build_program
from jepa_jax.program.flops import count_flops
from jepa_jax.program.step import TrainState
from jepa_jax.runtime.mesh import make_mesh


def describe(config: Any) -> dict[str, Any]:
    """Parameters (by module, total, trainable), operations an image and steps of a run."""

    facts = data_facts(config.data)
    batch = abstract_batch(facts.spec, config.data.batch_size)
    program = build_program(
        config,
        num_train=facts.num_train,
        num_classes=facts.num_classes,
        sample=batch,
        mesh=make_mesh(1, 1),
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
        "images_per_epoch": facts.num_train,
        "data_found": facts.found,
        "steps_per_epoch": program.length.steps_per_epoch,
        "steps_total": program.length.total_steps,
    }


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
