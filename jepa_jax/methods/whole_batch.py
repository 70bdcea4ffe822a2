"""Methods whose loss compares the elements of a batch with each other: VICReg, SIGReg, InfoNCE, Barlow Twins, ...

Such a method says apart from each other what it encodes of every element and what it makes of all of them. With that,
the step computes a batch in parts and still gets the gradient of the loss of the whole batch; see
`jepa_jax.program.accumulation`.
"""

from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jepa_jax.config.groups import Config
from jepa_jax.methods.contract import Batch, Method, Output, Terms, build_method


class Encoded(NamedTuple):
    """What a method makes of each element of a batch, or of a part of it.

    Attributes:
      embeddings: tree of float arrays, the batch as first axis, that `batch_loss` reads of all elements at once.
      features: of the elements, for the online probe.
      loss: a term that is a mean over elements, added to what `batch_loss` returns.
      terms: named scalars that are means over elements.
    """

    embeddings: Any
    features: Float[Array, "b f"] | None = None
    loss: Float[Array, ""] | float = 0.0
    terms: Terms = {}


class WholeBatchMethod(Method):
    """A method with a loss of the whole batch; it supplies `encode_batch` and `batch_loss` instead of `loss`.

    Attributes:
      compares_elements: False where the loss is a mean over elements after all, as a config may have it.
      heads_of_batch: attributes of the model that `batch_loss` alone runs: their batch norm sees the whole batch.
    """

    compares_elements: bool = True
    heads_of_batch: tuple[str, ...] = ()

    def encode_batch(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Encoded:
        """Returns what is made of each element by itself; the arguments are those of `loss`."""
        raise NotImplementedError

    def batch_loss(
        self, model: Any, target: Any, embeddings: Any, key: jax.Array, step: jax.Array
    ) -> tuple[Float[Array, ""], Terms]:
        """Returns the loss of the embeddings of all elements, and its terms."""
        raise NotImplementedError

    def loss(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        encoded = self.encode_batch(model, target, batch, key, step)
        loss, terms = self.batch_loss(model, target, encoded.embeddings, key, step)
        return Output(jnp.asarray(encoded.loss + loss), {**encoded.terms, **terms}, encoded.features)


def accumulates_exactly(method: Method, config: Config) -> TypeGuard[WholeBatchMethod]:
    """Returns whether a batch in parts has the gradient of the loss of the whole batch, by embedding all parts first.

    A loss that is a mean over elements needs no such pass: its parts have that gradient anyway. A method with a `loss`
    of its own has not said what its parts are.
    """
    if not isinstance(method, WholeBatchMethod) or type(method).loss is not WholeBatchMethod.loss:
        return False
    return config.train.accum == "exact" and method.compares_elements


def accumulation_effect(config: Config) -> str:
    """Returns a sentence on what accumulation keeps of the objective of a config."""
    method = build_method(config, total_steps=1)
    if accumulates_exactly(method, config):
        return (
            "Accumulation keeps the batch and the loss of all of it (train.accum=exact) at the cost of one more "
            "forward pass; batch norm of the encoder sees one part at a time."
        )
    return "Accumulation keeps the batch; losses and norms over a batch see one part at a time."
