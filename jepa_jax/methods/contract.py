"""The contract of a method: what is learned. Loop, step, profiler, sweep and planner know methods only through this.

Optional abilities are protocols: `EncoderMethod` for a method that learns an encoder, `PredictorMethod` for one whose
model predicts something. `image_method.ImageMethod` is the base class of encoder methods of images.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
from flax import nnx
from jaxtyping import Array, Float, UInt8

from jepa_jax.base.classes import find_class
from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.owners import METHODS

Batch = Mapping[str, Any]  # arrays by the names that the data source declares
Terms = dict[str, jax.Array]


class Output(NamedTuple):
    """What a method's loss returns to the step."""

    loss: Float[Array, ""]
    terms: Terms  # named scalars for the metrics
    features: Float[Array, "b f"] | None = None  # of the batch, for the online probe; the step detaches them


class Ema(NamedTuple):
    """A copy of parts of the model that follows them slowly; it starts equal to them and has its own statistics."""

    modules: tuple[str, ...]  # attributes of the model
    momentum: Callable[[jax.Array], jax.Array]  # by step; 1 keeps the copy as it is


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """Parameters whose path contains `pattern` and which are optimised differently from the rest.

    Attributes:
      pattern: regular expression searched in the path, e.g. "^predictor/".
      lr: peak rate of its own, to which warm-up and end of the schedule are in proportion; None for `optim.lr`.
      constant: whether the rate stays at its peak instead of following the schedule.
      weight_decay: decay of its own; None for the config's.
      frozen_steps: steps at the start in which the parameters do not change; -1 for all steps.
      clip: norm that the gradients of the group are clipped at by themselves; None: at `optim.clip_norm`, together
        with all parameters that have no clip of their own.
    """

    pattern: str
    lr: float | None = None
    constant: bool = False
    weight_decay: float | None = None
    frozen_steps: int = 0
    clip: float | None = None


class Pretrained(NamedTuple):
    """Variables of a model that were trained elsewhere and replace those of `init`."""

    params: Mapping[str, Any] = {}  # nested by the attributes of the model, any part of it
    stats: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()  # sentences that say what was loaded and adapted


class Method:
    """Base class of methods; a method supplies `Keys`, `init` and `loss` and knows no mesh, optimizer or sink.

    Attributes:
      Keys: the keys of its `method` group.
      config, run_config: its own group, and the config of the whole run.
      evaluators: how it is judged: names of `jepa_jax.evals`, or "package.module:Class".
      loader: function that loads a trained model of a method without features, e.g. "my_package.load", for messages.
      levels: ways in which features can be read, such as scales, of which 0 is the finest.
      ema: the slow copy that `loss` gets as `target`, if any.
      param_groups: parameters with a rate or decay of their own.
      pretrained: pretrained variables that replace random ones; read by training only.
    """

    Keys: ClassVar[type[NamedGroup]] = NamedGroup
    evaluators: tuple[str, ...] = ()
    loader: str = ""
    levels: int = 1
    ema: Ema | None = None
    param_groups: tuple[ParamGroup, ...] = ()
    pretrained: Pretrained = Pretrained()

    def __init__(self, config: Config, total_steps: int):
        """`total_steps` is the length of the method's schedules."""
        self.run_config = config
        self.config: Any = config.method
        self.total_steps = total_steps

    @property
    def level_names(self) -> tuple[str, ...]:
        """What the evaluation calls each level."""
        return tuple(f"level {level}" for level in range(self.levels))

    def init(self, key: jax.Array, sample: Batch) -> nnx.Module:
        """Returns the model; `sample` is a batch of training data."""
        raise NotImplementedError

    def loss(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        """Returns the loss of a batch and updates the model's statistics in place.

        Args:
          model: what `init` made.
          batch: arrays by the names that the data source declares.
          target: the model with the weights and statistics of its slow copy, without gradient; None without `ema`.
          key: random key of this step, or of this part of it with accumulation; equal on all devices.
          step: number of the update, from 0.
        """
        raise NotImplementedError

    def example_views(self, batch: Batch, key: jax.Array) -> Float[Array, "v b h w c"] | None:
        """Returns what the loss sees of these images, normalised, for the report; None if there is nothing to see."""
        del batch, key
        return None

    def pictures(
        self, model: Any, batch: Batch, key: jax.Array
    ) -> Float[Array, "v b h w c"] | UInt8[Array, "v b h w 3"] | None:
        """Returns what the model makes of these elements; None where there is nothing to see.

        Floats are images normalised as `data.augment` says; uint8 is RGB that is shown as it is. Pictures of one
        element form a row.
        """
        del model, batch, key
        return None


def build_method(config: Config, *, total_steps: int) -> Method:
    """Returns the method that `config.method.name` names; `total_steps` is the length of its schedules."""
    return find_class("method.name", config.method.name, METHODS)(config, total_steps)


@runtime_checkable
class EncoderMethod(Protocol):
    """A method whose model maps the elements of a batch to features."""

    def features(
        self, model: Any, batch: Batch, *, level: int = 0, normalised: bool = True, train: bool = False
    ) -> Float[Array, "b f"]:
        """Returns the features of a level; with `train`, batch norm uses and updates the statistics of this batch."""


@runtime_checkable
class ViewMethod(Protocol):
    """A method of other elements than images that knows random views of them, between which LiDAR compares."""

    def random_views(self, batch: Batch, keys: jax.Array) -> Batch:
        """Returns a random view of each element, with the arrays that `features` reads; one key per element."""


@runtime_checkable
class PatchMethod(Protocol):
    """A method whose model may have features of patches."""

    def feature_map(self, model: Any, batch: Batch) -> Float[Array, "b rows columns f"] | None:
        """Returns features of each patch; None for an encoder without a grid of patches."""


@runtime_checkable
class LayerMethod(Protocol):
    """A method whose model may have features of its last layers."""

    def layer_features(self, model: Any, batch: Batch, count: int) -> Float[Array, "b f"] | None:
        """Returns features of the last `count` layers, side by side; None for an encoder that does not show them."""


@runtime_checkable
class AttentionMethod(Protocol):
    """A method whose model may have attention to patches."""

    def attention_maps(self, model: Any, batch: Batch) -> Float[Array, "b heads rows columns"] | None:
        """Returns how much of each patch the heads of the last block read; None for an encoder without attention."""


@runtime_checkable
class PredictorMethod(Protocol):
    """A method whose model is evaluated by its predictions."""

    def predict(self, model: Any, batch: Batch, *, train: bool = False) -> jax.Array:
        """Returns the predictions; with `train`, batch norm uses and updates the statistics of this batch."""
