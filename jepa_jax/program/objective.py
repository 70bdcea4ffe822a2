"""The function whose gradient a step takes: a method's loss of a batch, and the online probe on its features."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.methods.contract import Batch, Method, Output
from jepa_jax.models.heads import probe_logits
from jepa_jax.program.dead_parameters import note_gradients
from jepa_jax.program.step_metrics import Metrics
from jepa_jax.program.variables import variables_of

if TYPE_CHECKING:
    from jepa_jax.program.step import StateFactory, TrainState

PyTree = Any
# Metrics that the step adds to the terms of a method.
RESERVED = {"loss", "grad_norm", "update_norm", "lr", "ema_momentum", "probe_loss", "probe_accuracy"}
# Far from the small numbers that methods fold or split into the key of a step.
MODEL_STREAM, TARGET_STREAM = 2**31 + 1, 2**31 + 2


@dataclasses.dataclass(frozen=True)
class Objective:
    """A method's loss as a function of parameters and statistics.

    Attributes:
      dropout: False measures a model: nothing is dropped, while batch norm works as in training.
      reached: gets the paths of the parameters that a traced gradient reaches.
    """

    method: Method
    factory: "StateFactory"
    dropout: bool = True
    reached: set[str] | None = None

    def models(self, params: PyTree, stats: PyTree, state: "TrainState", key: jax.Array) -> tuple[Any, Any]:
        """Returns the model and, for a method with a slow copy, the model with the weights of that copy."""
        weights = params["model"] if self.reached is None else note_gradients(params["model"], self.reached)
        model = self.factory.merge(weights, stats["model"], jax.random.fold_in(key, MODEL_STREAM))
        if not self.dropout:
            drop_nothing(model)
        if not self.method.ema:
            return model, None
        target = jax.lax.stop_gradient({**params["model"], **state.target})
        slow_stats, slow_key = {**stats["model"], **stats["target"]}, jax.random.fold_in(key, TARGET_STREAM)
        slow = self.factory.merge(target, slow_stats, slow_key)
        drop_nothing(slow)  # it is what the model learns from
        return model, slow

    def loss(
        self, params: PyTree, stats: PyTree, state: "TrainState", batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
        """Returns the loss of a batch, the statistics after it and the metrics."""
        model, slow = self.models(params, stats, state, key)
        output = checked_output(self.method, self.method.loss(model, slow, batch, key, state.step))
        loss, metrics = with_probe(params, output, batch)
        return loss, (statistics_after(model, slow, stats), metrics)


def with_probe(params: PyTree, output: Output, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Returns what is minimised, the method's loss and that of the online probe if there is one, and the metrics."""
    loss, metrics = output.loss, {"loss": output.loss, **output.terms}
    if "probe" in params and output.features is not None:
        probe_loss, hits = probe_objective(params["probe"], output.features, batch["label"])
        loss, metrics = loss + probe_loss, metrics | {"probe_loss": probe_loss, "probe_accuracy": hits}
    return loss, metrics


def statistics_of(state: "TrainState") -> dict[str, PyTree]:
    """Returns what a forward pass may change of a state."""
    return {"model": state.stats, "target": state.target_stats}


def statistics_after(model: Any, slow: Any, stats: PyTree) -> dict[str, PyTree]:
    new: dict[str, PyTree] = {"model": variables_of(model), "target": {}}
    if slow is not None:
        new["target"] = {name: variables_of(slow)[name] for name in stats["target"]}
    return new


def checked_output(method: Method, output: Any) -> Output:
    """Returns what a loss returned; raises UserError, while the step is traced, unless it is as `Output` declares."""
    where = f"{type(method).__name__}.loss"
    if not isinstance(output, Output):
        raise UserError(f"{where}: returns {type(output).__name__}; return Output(loss, terms) of methods.contract")
    for name, value in {"loss": output.loss, **output.terms}.items():
        if jnp.shape(value) != ():
            raise UserError(f"{where}: {name!r} has the shape {jnp.shape(value)}; return a scalar, such as its mean")
    if taken := RESERVED & output.terms.keys():
        raise UserError(f"{where}: the step has a metric {min(taken)!r} of its own; give the term another name")
    return output


def drop_nothing(model: nnx.Module) -> None:
    """Switches dropout and stochastic depth of a model off, also in passes for training."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Dropout):
            module.deterministic = True


def probe_objective(probe: PyTree, features: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cross-entropy and accuracy in percent of the online probe on detached features."""
    with jax.named_scope("probe"):
        logits = probe_logits(probe, jax.lax.stop_gradient(features))
        loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
        return loss, 100 * jnp.mean(jnp.argmax(logits, axis=-1) == labels)
