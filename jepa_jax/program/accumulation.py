"""Gradient accumulation: a batch computed in equal parts, one after the other, in the memory of one part.

For a loss that is a mean over elements, the mean of the parts' gradients is the gradient of the batch. A loss that
compares elements (VICReg, SIGReg, InfoNCE, ...) would see a smaller batch that way, and SIGReg's gradient would even
shrink with it. `exact_gradient` therefore embeds all parts without a gradient, takes the loss's gradient by the
embeddings of the whole batch, and carries it back through one part after the other, with the same random numbers. It
costs one more forward pass. Reference: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited
Setup", 2021.

Statistics are those of an update, not of its parts: each part starts from those before the update, and their changes
are averaged. Batch norm before the embeddings normalises by a part alone.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jepa_jax.methods.contract import Batch, Output
from jepa_jax.methods.whole_batch import WholeBatchMethod
from jepa_jax.program.objective import Objective, checked_output, statistics_after, statistics_of, with_probe
from jepa_jax.program.step_metrics import Metrics

if TYPE_CHECKING:
    from jepa_jax.program.step import TrainState

PyTree = Any
Gradient = tuple[PyTree, tuple[PyTree, Metrics]]  # by the parameters; then statistics and metrics


def mean_gradient(gradient: Callable, state: "TrainState", batch: Batch, key: jax.Array, parts: int) -> Gradient:
    stats = statistics_of(state)

    def one_part(grads: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        index, part = inputs
        new, others = gradient(state.params, stats, state, part, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, grads, new), others

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    grads, (changed, metrics) = jax.lax.scan(one_part, zeros, (jnp.arange(parts), split(batch, parts)))
    return jax.tree.map(lambda g: g / parts, grads), (mean_change(stats, changed), mean_over_parts(metrics))


def exact_gradient(objective: Objective, state: "TrainState", batch: Batch, key: jax.Array, parts: int) -> Gradient:
    """Returns gradient and metrics of the loss of the whole batch, computed in parts."""
    method, stats = objective.method, statistics_of(state)
    assert isinstance(method, WholeBatchMethod)
    indices, inputs = jnp.arange(parts), split(batch, parts)

    def encode(params: PyTree, index: jax.Array, part: Batch) -> tuple[Any, PyTree]:
        own_key = jax.random.fold_in(key, index)
        model, slow = objective.models(params, stats, state, own_key)
        encoded = method.encode_batch(model, slow, part, own_key, state.step)
        return encoded, statistics_after(model, slow, stats)

    def embed(_: None, inputs: PyTree) -> tuple[None, PyTree]:
        encoded, changed = encode(state.params, *inputs)
        return None, (encoded.embeddings, encoded.features, changed["target"])

    _, (embedded, features, slow_stats) = jax.lax.scan(embed, None, (indices, inputs))
    embeddings, features = join((embedded, features))

    def batch_loss(params: PyTree, embeddings: PyTree) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
        model, slow = objective.models(params, stats, state, key)
        loss, terms = method.batch_loss(model, slow, embeddings, key, state.step)
        total, metrics = with_probe(params, checked_output(method, Output(loss, terms, features)), batch)
        return total, (statistics_after(model, slow, stats), metrics)

    with jax.named_scope("whole_batch"):
        gradient = jax.grad(batch_loss, argnums=(0, 1), has_aux=True)
        (grads, by_embedding), (after_loss, metrics) = gradient(state.params, embeddings)

    def carried(params: PyTree, index: jax.Array, part: Batch, wanted: PyTree) -> tuple[jax.Array, PyTree]:
        encoded, changed = encode(params, index, part)
        dots = jax.tree.map(lambda e, g: jnp.sum((e * g).astype(jnp.float32)), encoded.embeddings, wanted)
        own = jnp.asarray(encoded.loss, jnp.float32)
        checked_output(method, Output(own, encoded.terms))
        return own / parts + sum(jax.tree.leaves(dots)), (own, encoded.terms, changed["model"])

    def one_part(grads: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        new, others = jax.grad(carried, has_aux=True)(state.params, *inputs)
        return jax.tree.map(jnp.add, grads, new), others

    grads, (losses, terms, model_stats) = jax.lax.scan(one_part, grads, (indices, inputs, split(by_embedding, parts)))
    metrics = metrics | mean_over_parts(terms) | {"loss": metrics["loss"] + jnp.mean(losses)}
    encoded_stats = mean_change(stats, {"model": model_stats, "target": slow_stats})
    # What the encoder and what the loss changed: each leaves alone what the other has seen.
    both = jax.tree.map(lambda a, b, old: a + (b - old), encoded_stats, after_loss, stats)
    return grads, (both, metrics)


def split(batch: PyTree, parts: int) -> PyTree:
    """Returns arrays [parts, b / parts, ...] of arrays [b, ...].

    Part i takes every `parts`-th element: each device then finds its share of a part among its own.
    """
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), batch)


def join(split_batch: PyTree) -> PyTree:
    """Undoes `split`."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), split_batch)


def mean_over_parts(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), tree)


def mean_change(old: PyTree, new: PyTree) -> PyTree:
    """Returns statistics changed by the mean of the changes [parts, ...]; what no part changes stays as it is."""
    return jax.tree.map(lambda a, b: a + jnp.mean(b - a, axis=0).astype(a.dtype), old, new)
