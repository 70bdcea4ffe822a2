"""The training step: one pure function of state and batch, compiled once, laid out over the mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jepa_jax.methods.contract import Batch, EncoderMethod, Method, PredictorMethod, Pretrained
from jepa_jax.models.heads import init_probe
from jepa_jax.models.remat import without_remat
from jepa_jax.program.accumulation import exact_gradient, mean_gradient
from jepa_jax.program.objective import Objective, drop_nothing, statistics_of
from jepa_jax.program.optim import averaged_params, ema_update, global_norm
from jepa_jax.program.step_metrics import StepMetrics
from jepa_jax.program.variables import check_variables, random_variables, with_variables
from jepa_jax.runtime.mesh import batch_sharding, replicated

PyTree = Any
# Splitting small arrays costs a collective each and saves nothing.
FSDP_SMALLEST_SIZE = 2**14


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Everything that changes from step to step."""

    step: jax.Array
    key: jax.Array  # data of the run's random key; part of the state, so that a seed is no part of the program
    params: PyTree  # {"model": ...} and, with labels, {"probe": ...}
    stats: PyTree  # batch statistics and other variables of the model that are not trained
    opt_state: PyTree
    target: PyTree  # slowly following copies of parts of the model, by name; {} for a method without them
    target_stats: PyTree  # statistics of those copies


class TrainStep(Protocol):
    """The jitted step: state (donated) and batch in, state and metrics out."""

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]: ...

    def trace(self, state: Any, batch: Any) -> jax.stages.Traced: ...

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered: ...


@dataclasses.dataclass(frozen=True)
class StateFactory:
    """Makes the state of a method: its structure without arrays, its layout, and the arrays themselves."""

    graphdef: nnx.GraphDef
    random_state: nnx.State  # shapes of the random state of dropout and the like, which each step draws anew
    abstract: TrainState  # ShapeDtypeStructs with shardings
    create: Callable[[int, Batch], TrainState]  # from a seed and a sample batch
    pretrained: Callable[[], Pretrained]  # what is loaded instead of drawn; reads files when it is called first

    @property
    def shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    def merge(self, params: PyTree, stats: PyTree, key: jax.Array | None = None) -> Any:
        """Returns the model with these variables; dropout and the like draw from `key`."""
        key = jax.random.key(0) if key is None else key
        return nnx.merge(self.graphdef, params, stats, random_variables(self.random_state, key), copy=True)


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, PyTree, PyTree, nnx.State]:
    """Returns structure, trained parameters, other variables and random state of a model."""
    parts: Any = nnx.split(model, nnx.Param, nnx.RngState, ...)
    graphdef, params, random_state, rest = parts
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(rest), random_state


def shapes_of(batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()}


def abstract_model(method: Method, sample: Mapping[str, Any]) -> nnx.Module:
    return nnx.eval_shape(lambda batch: method.init(jax.random.key(0), batch), shapes_of(sample))


def state_factory(
    method: Method,
    tx: optax.GradientTransformation,
    model: nnx.Module,
    *,
    sample: Mapping[str, Any],
    num_classes: int,
    mesh: Mesh,
    load: Callable[[PyTree], Pretrained],
) -> StateFactory:
    """Plans the state for a sample batch (arrays or ShapeDtypeStructs) without computing it.

    Args:
      model: what `abstract_model` returns.
      load: gets the shapes of the model's trained variables and returns what replaces fresh ones.
    """
    shapes = shapes_of(sample)
    graphdef, _, _, random_state = split_model(model)
    width = feature_width(method, graphdef, model, shapes) if num_classes else 0

    def create(seed: jax.Array, batch: Batch, loaded: tuple[PyTree, PyTree]) -> TrainState:
        # Initial weights and steps draw from different keys.
        init_key, key = jax.random.split(jax.random.key(seed))
        _, weights, stats, _ = split_model(method.init(init_key, batch))
        weights, stats = map(with_variables, (weights, stats), loaded)
        params = {"model": weights} | ({"probe": init_probe(width, num_classes)} if width else {})
        modules = method.ema.modules if method.ema else ()
        return TrainState(
            step=jnp.zeros([], jnp.int32),
            key=jax.random.key_data(key),
            params=params,
            stats=stats,
            opt_state=tx.init(params),
            target={name: weights[name] for name in modules},
            target_stats={name: stats[name] for name in modules if stats.get(name)},
        )

    states = jax.eval_shape(create, 0, shapes, ({}, {}))
    shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, fsdp_spec(leaf.shape, mesh)), states)
    abstract = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), states, shardings)
    compiled = jax.jit(create, out_shardings=shardings)

    @functools.cache
    def pretrained() -> Pretrained:
        return load(abstract.params["model"])

    def create_checked(seed: int, batch: Batch) -> TrainState:
        loaded = pretrained()[:2]
        for kind, new, own in zip(("params", "stats"), loaded, (abstract.params["model"], abstract.stats), strict=True):
            check_variables(new, own, f"{type(method).__name__}.pretrained.{kind}")
        return compiled(seed, batch, loaded)

    return StateFactory(graphdef, random_state, abstract, create_checked, pretrained)


def feature_width(method: Method, graphdef: nnx.GraphDef, model: nnx.Module, batch: Mapping[str, Any]) -> int:
    """Returns how many numbers per image a method's features have; 0 for a method without features."""
    if not isinstance(method, EncoderMethod):
        return 0
    variables = nnx.state(model)
    features = jax.eval_shape(lambda v, b: method.features(nnx.merge(graphdef, v), b), variables, batch)
    return features.shape[-1]


def fsdp_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Splits the largest axis that the `fsdp` devices divide; small arrays stay whole."""
    devices = mesh.shape["fsdp"]
    splittable = [axis for axis, size in enumerate(shape) if size % devices == 0]
    if devices == 1 or math.prod(shape) < FSDP_SMALLEST_SIZE or not splittable:
        return P()
    widest = max(splittable, key=lambda axis: shape[axis])
    return P(*("fsdp" if axis == widest else None for axis in range(len(shape))))


def make_train_step(
    method: Method,
    tx: optax.GradientTransformation,
    factory: StateFactory,
    *,
    accum_steps: int,
    exact: bool,
    learning_rate: optax.Schedule,
    mesh: Mesh,
    reached: set[str] | None = None,
    remat: bool = True,
) -> TrainStep:
    """Returns the compiled step: state (donated) and batch in, state and scalar metrics out.

    Args:
      accum_steps: parts that the batch is computed in; see `jepa_jax.program.accumulation`.
      exact: whether the parts have the gradient of a loss of the whole batch, which takes a `WholeBatchMethod`.
      reached: when the step is traced, gets the paths of the parameters that the loss depends on.
      remat: False makes a step that recomputes nothing, whatever the config says.
    """
    objective = Objective(method, factory, reached=reached)
    gradient = jax.grad(objective.loss, has_aux=True)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        if accum_steps == 1:
            grads, (stats, metrics) = gradient(state.params, statistics_of(state), state, batch, key)
        elif exact:
            grads, (stats, metrics) = exact_gradient(objective, state, batch, key, accum_steps)
        else:
            grads, (stats, metrics) = mean_gradient(gradient, state, batch, key, accum_steps)
        with jax.named_scope("optimizer"):
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            metrics["grad_norm"] = global_norm(grads["model"])
            # The loss is that of the parameters before the update; this tells whether those after it are finite.
            metrics["update_norm"] = global_norm(updates["model"])
            metrics["lr"] = learning_rate(state.step)
        target = state.target
        if method.ema:
            with jax.named_scope("ema"):
                momentum = metrics["ema_momentum"] = method.ema.momentum(state.step)
                target = ema_update(target, {name: params["model"][name] for name in target}, momentum)
        new = TrainState(state.step + 1, state.key, params, stats["model"], opt_state, target, stats["target"])
        return new, StepMetrics.of(metrics)

    def useful_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        with without_remat():
            return train_step(state, batch)

    return jax.jit(
        with_mesh(mesh, train_step if remat else useful_step),
        donate_argnums=0,
        in_shardings=(factory.shardings, batch_sharding(mesh)),
        out_shardings=(factory.shardings, replicated(mesh)),
        compiler_options=compiler_options(mesh),
    )


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """Returns options of XLA for a mesh: on several GPUs, exchanges overlap with the backward pass."""
    if mesh.size == 1 or mesh.devices.flat[0].platform == "cpu":
        return {}
    return {"xla_gpu_enable_latency_hiding_scheduler": True}


def with_mesh(mesh: Mesh | AbstractMesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, traced under the mesh so that attention can shard its kernel."""

    @functools.wraps(function)
    def traced(*arguments: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    return traced


def evaluated_variables(state: TrainState, weights: str) -> tuple[PyTree, PyTree]:
    """Returns the parameters and statistics that evaluations read: as trained ("online"), or of the slow copies.

    As trained are the averages that a schedule-free optimizer keeps, or else the parameters of the last step.
    """
    params = averaged_params(state.params["model"], state.opt_state)
    if weights == "online":
        return params, state.stats
    return {**params, **state.target}, {**state.stats, **state.target_stats}


def with_evaluated_statistics(state: TrainState, weights: str, stats: PyTree) -> TrainState:
    """Returns the state in which `evaluated_variables` finds these statistics."""
    if weights == "online":
        return dataclasses.replace(state, stats=stats)
    return dataclasses.replace(state, target_stats={name: stats[name] for name in state.target_stats})


def make_feature_step(
    method: EncoderMethod, factory: StateFactory, mesh: Mesh, *, level: int = 0, normalised: bool = True
) -> Callable[[PyTree, PyTree, Batch], jax.Array]:
    """Returns the compiled function (model params, stats, batch) -> features on every device, in evaluation mode."""

    def features(params: PyTree, stats: PyTree, batch: Batch) -> jax.Array:
        return method.features(factory.merge(params, stats), batch, level=level, normalised=normalised)

    shardings = (factory.shardings.params["model"], factory.shardings.stats, batch_sharding(mesh))
    return jax.jit(with_mesh(mesh, features), in_shardings=shardings, out_shardings=replicated(mesh))


def evaluated_forward(method: Method) -> Callable[..., jax.Array] | None:
    """Returns the pass that evaluations run, a function of (model, batch, train=...); None for a method without one."""
    if isinstance(method, EncoderMethod):
        return method.features
    return method.predict if isinstance(method, PredictorMethod) else None


def reads_statistics(method: Method, mesh: Mesh, model: nnx.Module, batch: Any) -> bool:
    """Returns whether evaluations read batch statistics, those of heads aside; model and batch may be abstract."""
    forward, found = evaluated_forward(method), []
    assert forward is not None
    if not jax.tree.leaves(nnx.state(model, nnx.BatchStat)):  # its method need not know of training mode
        return False

    def look(model: nnx.Module, batch: Batch) -> None:
        before = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
        forward(model, batch, train=True)
        after = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
        found.append(any(new is not old for new, old in zip(after, before, strict=True)))

    nnx.eval_shape(with_mesh(mesh, look), model, batch)
    return found[0]


def make_statistics_step(
    method: Method, factory: StateFactory, mesh: Mesh
) -> Callable[[PyTree, PyTree, Batch], PyTree]:
    """Returns the compiled function (model params, stats, batch) -> batch statistics of this batch alone.

    Nothing is dropped: the statistics are for evaluations, which drop nothing.
    """
    forward = evaluated_forward(method)
    assert forward is not None

    def statistics(params: PyTree, stats: PyTree, batch: Batch) -> PyTree:
        model = factory.merge(params, stats)
        drop_nothing(model)
        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.BatchNorm):
                module.momentum = 0.0
        forward(model, batch, train=True)
        return nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    shardings = (factory.shardings.params["model"], factory.shardings.stats, batch_sharding(mesh))
    return jax.jit(with_mesh(mesh, statistics), in_shardings=shardings, out_shardings=replicated(mesh))


def pooled_statistics(batches: Sequence[PyTree]) -> PyTree:
    """Returns the statistics of several batches of one size together, from those of each; all in NumPy.

    The variance over all images is the mean of the batches' variances plus the variance of their means.
    """
    if not isinstance(batches[0], Mapping):
        return sum(batches) / len(batches) if len(batches) > 1 else batches[0]
    pooled = {name: pooled_statistics([batch[name] for batch in batches]) for name in batches[0]}
    if {"mean", "var"} <= pooled.keys():
        of_means = sum(np.square(batch["mean"] - pooled["mean"]) for batch in batches) / len(batches)
        pooled["var"] = pooled["var"] + of_means
    return pooled
