"""The training step: one pure function of state and batch, compiled once, laid out over the mesh.

Gradient accumulation computes a batch in equal parts, one after the other, and averages their gradients. For a loss
that is a mean over images this equals the whole batch; a *batch* loss (VICReg, SIGReg) and batch norm then see the
statistics of a part, so accumulation is also a smaller statistical batch. Compare runs at equal
`batch_size / accum_steps`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jepa_jax.methods import Method
from jepa_jax.models.heads import init_probe, probe_logits
from jepa_jax.program.optim import ema_update
from jepa_jax.runtime.mesh import batch_sharding, replicated

PyTree = Any
Metrics = dict[str, jax.Array]
# Splitting small arrays costs a collective each and saves nothing.
FSDP_SMALLEST_SIZE = 2**14


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Everything that changes from step to step."""

    step: jax.Array
    key: jax.Array  # data of the run's random key; part of the state, so that a seed is no part of the program
    params: PyTree  # {"model": ..., "probe": ...}
    stats: PyTree  # batch statistics
    opt_state: PyTree
    target: PyTree  # slowly following copies of parts of the model, by name; {} for a method without them


@dataclasses.dataclass(frozen=True)
class StateFactory:
    """How to make a state of a method: its structure without arrays, its layout, and the arrays themselves."""

    graphdef: nnx.GraphDef
    abstract: TrainState  # ShapeDtypeStructs with shardings
    create: Callable[[int, jax.Array | np.ndarray], TrainState]  # from a seed and uint8 sample images

    @property
    def shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)


def state_factory(
    method: Method, tx: optax.GradientTransformation, *, sample: Any, num_classes: int, mesh: Mesh
) -> StateFactory:
    """Plans the state for sample images (arrays or ShapeDtypeStructs) without computing it."""
    sample = jax.ShapeDtypeStruct(sample.shape, sample.dtype)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda images: method.init(jax.random.key(0), images), sample))

    def create(seed, images):
        key = jax.random.key(seed)
        model = method.init(key, images)
        weights, stats = nnx.state(model, nnx.Param, ...)
        # Split and merged again: remat writes to the variables of a model, which must be of its own trace.
        structure, variables = nnx.split(model)
        features = jax.eval_shape(lambda v, x: method.features(nnx.merge(structure, v), x), variables, images)
        params = {"model": nnx.to_pure_dict(weights), "probe": init_probe(features.shape[-1], num_classes)}
        target = {name: params["model"][name] for name in method.ema.modules} if method.ema else {}
        return TrainState(
            step=jnp.zeros([], jnp.int32),
            key=jax.random.key_data(key),
            params=params,
            stats=nnx.to_pure_dict(stats),
            opt_state=tx.init(params),
            target=target,
        )

    shapes = jax.eval_shape(create, 0, sample)
    shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, fsdp_spec(leaf.shape, mesh)), shapes)
    abstract = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)
    return StateFactory(graphdef, abstract, jax.jit(create, out_shardings=shardings))


def fsdp_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Splits the largest axis that the `fsdp` devices divide; small arrays stay whole."""
    devices = mesh.shape["fsdp"]
    splittable = [axis for axis, size in enumerate(shape) if size % devices == 0]
    size = 1
    for extent in shape:
        size *= extent
    if devices == 1 or size < FSDP_SMALLEST_SIZE or not splittable:
        return P()
    widest = max(splittable, key=lambda axis: shape[axis])
    return P(*("fsdp" if axis == widest else None for axis in range(len(shape))))


def make_train_step(
    method: Method,
    tx: optax.GradientTransformation,
    factory: StateFactory,
    *,
    accum_steps: int,
    learning_rate: optax.Schedule,
    mesh: Mesh,
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, Metrics]]:
    """The compiled step: state (donated) and batch in, state and scalar metrics out."""

    def loss_fn(params, stats, target, batch, key, step):
        model = nnx.merge(factory.graphdef, params["model"], stats, copy=True)
        slow = None
        if method.ema:
            weights = jax.lax.stop_gradient({**params["model"], **target})
            slow = nnx.merge(factory.graphdef, weights, stats, copy=True)
        output = method.loss(model, slow, batch, key, step)
        with jax.named_scope("probe"):
            logits = probe_logits(params["probe"], jax.lax.stop_gradient(output.features))
            probe_loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))
            hits = jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])
        metrics = {"loss": output.loss, **output.terms, "probe_loss": probe_loss, "probe_accuracy": 100 * hits}
        stats = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
        return output.loss + probe_loss, (stats, metrics)

    gradient = jax.grad(loss_fn, has_aux=True)

    def train_step(state, batch):
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        if accum_steps == 1:
            grads, (stats, metrics) = gradient(state.params, state.stats, state.target, batch, key, state.step)
        else:
            grads, (stats, metrics) = accumulate(gradient, state, batch, key, accum_steps)
        with jax.named_scope("optimizer"):
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            metrics["grad_norm"] = optax.global_norm(grads["model"])
            # The loss is that of the parameters before the update; this one says whether those after it are finite.
            metrics["update_norm"] = optax.global_norm(updates["model"])
            metrics["lr"] = learning_rate(state.step)
        target = state.target
        if method.ema:
            with jax.named_scope("ema"):
                momentum = metrics["ema_momentum"] = method.ema.momentum(state.step)
                target = ema_update(target, {name: params["model"][name] for name in target}, momentum)
        return TrainState(state.step + 1, state.key, params, stats, opt_state, target), metrics

    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(factory.shardings, batch_sharding(mesh)),
        out_shardings=(factory.shardings, replicated(mesh)),
    )


def accumulate(gradient: Callable, state: TrainState, batch: PyTree, key: jax.Array, parts: int):
    """Mean gradient and metrics over `parts` of the batch; batch statistics pass from one part to the next."""

    # Part i takes every `parts`-th image: each device then finds its share of a part among its own images.
    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)

    def one_part(carry, inputs):
        grads, stats = carry
        index, part = inputs
        part_key = jax.random.fold_in(key, index)
        new, (stats, metrics) = gradient(state.params, stats, state.target, part, part_key, state.step)
        return (jax.tree.map(jnp.add, grads, new), stats), metrics

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    inputs = (jnp.arange(parts), jax.tree.map(split, batch))
    (grads, stats), metrics = jax.lax.scan(one_part, (zeros, state.stats), inputs)
    return jax.tree.map(lambda g: g / parts, grads), (stats, jax.tree.map(lambda m: jnp.mean(m, axis=0), metrics))


def evaluated_params(state: TrainState, weights: str) -> PyTree:
    """The model's parameters that evaluations read: as trained ("online"), or with the slow copies ("target")."""
    return state.params["model"] if weights == "online" else {**state.params["model"], **state.target}


def make_feature_step(
    method: Method, factory: StateFactory, mesh: Mesh, *, level: int = 0, normalised: bool = True
) -> Callable:
    """Compiled: (model params, stats, uint8 images) -> features on every device, in evaluation mode."""

    def features(params, stats, images):
        model = nnx.merge(factory.graphdef, params, stats, copy=True)
        return method.features(model, images, level=level, normalised=normalised)

    shardings = (factory.shardings.params["model"], factory.shardings.stats, batch_sharding(mesh))
    return jax.jit(features, in_shardings=shardings, out_shardings=replicated(mesh))


def make_statistics_step(method: Method, factory: StateFactory, mesh: Mesh) -> Callable:
    """Compiled: (model params, stats, uint8 images) -> stats in which batch norms hold those of these images alone."""

    def statistics(params, stats, images):
        model = nnx.merge(factory.graphdef, params, stats, copy=True)
        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.BatchNorm):
                module.momentum = 0.0
        method.features(model, images, train=True)
        return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    shardings = (factory.shardings.params["model"], factory.shardings.stats, batch_sharding(mesh))
    return jax.jit(statistics, in_shardings=shardings, out_shardings=factory.shardings.stats)
