"""Describes a config without training: its parameters, its cost per element and its length."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jepa_jax.compiled.flops import Rules, count_flops
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import words_of
from jepa_jax.data.facts import data_facts
from jepa_jax.data.photos.crops import batch_spec
from jepa_jax.data.pipeline import abstract_on
from jepa_jax.methods.contract import EncoderMethod
from jepa_jax.program.build import Program, build_program
from jepa_jax.program.dead_parameters import dead_parameters
from jepa_jax.program.step import feature_width
from jepa_jax.runtime.mesh import make_mesh

# As usually published: with padding, and convolutions as they are; on CPUs some are matrix products of patches.
PUBLISHED = Rules(platform="cuda", padding=True)
FIXED = nnx.All(nnx.Not(nnx.Param), nnx.Not(nnx.BatchStat), nnx.Not(nnx.RngState))


def describe(config: Config) -> dict[str, Any]:
    """Returns parameters (by module, total, trainable), operations per element and steps of a run.

    The data need not be there; its size is then assumed, and `data_found` is False.
    """
    data = data_facts(config.data, assume=True)
    mesh = make_mesh(1, 1, jax.local_devices())
    batch = abstract_on(mesh, data.spec, config.data.batch_size)
    trained_on = abstract_on(mesh, batch_spec(config, data.spec), config.data.batch_size)
    program = build_program(config, num_train=data.num_train, num_classes=data.num_classes, sample=batch, mesh=mesh)
    state = program.factory.abstract
    params = state.params["model"]
    return {
        "params_by_module": parameter_table(params),
        "params_total": count(params) + count(state.target) + fixed_parameters(program),
        "params_trainable": count(params),
        "params_dead": [one._asdict() for one in dead_parameters(program, trained_on)],
        "params_probe": count(state.params.get("probe")),
        "optimizer_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state)),
        "flops_per_image": count_flops(program.useful_step, state, trained_on) / config.data.batch_size,
        "encoder_macs_per_image": encoder_flops(program, batch, PUBLISHED) // 2 / config.data.batch_size,
        "feature_dim": feature_width(program.method, program.factory.graphdef, model_shapes(program), batch) or None,
        "elements": words_of(data.spec),
        "images_per_epoch": data.num_train,
        "data_found": data.found,
        "steps_per_epoch": program.length.steps_per_epoch,
        "steps_total": program.length.total_steps,
    }


def encoder_flops(program: Program, batch: Mapping[str, Any], rules: Rules | None = None) -> int:
    """Returns the operations of a batch's features, by default on this platform; 0 if the method has no encoder."""
    method, state = program.method, program.factory.abstract
    if not isinstance(method, EncoderMethod):
        return 0

    def features(params: Any, stats: Any, batch: Any) -> jax.Array:
        return method.features(program.factory.merge(params, stats), batch)

    backend = jax.default_backend()
    rules = rules or Rules(platform="cuda" if backend == "gpu" else backend)
    return count_flops(features, state.params["model"], state.stats, batch, rules=rules)


def model_shapes(program: Program) -> nnx.Module:
    state = program.factory.abstract
    return nnx.eval_shape(program.factory.merge, state.params["model"], state.stats)


def fixed_parameters(program: Program) -> int:
    """Returns how many numbers of the model are neither trained nor statistics, such as whitening filters."""
    return count(nnx.state(model_shapes(program), FIXED))


def parameter_table(params: Any) -> dict[str, int]:
    """Returns the number of parameters of each module, two levels deep, in the order of the tree."""
    table: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = jax.tree_util.keystr(path[: 3 if len(path) > 3 else len(path) - 1], simple=True, separator=".")
        table[name] = table.get(name, 0) + leaf.size
    return table


def count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
