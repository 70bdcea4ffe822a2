"""EmberFormer: the next mask of a wildfire from a history of masks, wind and terrain.

The temporal part is trained at `method.lr_temporal`, the spatial decoder and the refinement at `method.lr_spatial`. The
decoder may start from public SegFormer weights and stay as it is for the first epochs.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import Problem, key, subgroup
from jepa_jax.methods.contract import Batch, Method, Output, ParamGroup, Pretrained
from jepa_jax.models.registry import DTYPES
from jepa_jax.models.rngs import init_rngs
from jepa_jax.projects.wildfire.data.panels import element_panels
from jepa_jax.projects.wildfire.losses import MaskLossConfig, mask_loss
from jepa_jax.projects.wildfire.models.emberformer import EmberFormer, EmberFormerConfig
from jepa_jax.projects.wildfire.models.segformer import SIZES
from jepa_jax.projects.wildfire.models.segformer_weights import segformer_variables


@dataclasses.dataclass(frozen=True)
class EmberFormerMethodConfig(NamedGroup):
    reads_images: ClassVar[bool] = False

    spatial_lr: float = key(1e-4, "former name of method.lr_spatial", least=0)
    lr_temporal: float = key(
        1e-3, "peak rate of the temporal part at the reference batch", least=0, default_from="optim.lr"
    )
    lr_spatial: float = key(
        1e-4, "peak rate of decoder and refinement at the reference batch", least=0, default_from="method.spatial_lr"
    )
    frozen_epochs: float = key(
        0.0, "epochs at the start in which the decoder's weights stay, apart from its classifier's", least=0
    )
    loss: MaskLossConfig = subgroup(MaskLossConfig)

    def problems(self, config: Config) -> Iterator[Problem]:
        if not isinstance(config.model, EmberFormerConfig):
            yield Problem("model.name", "reads images; method.name = emberformer needs model.name = emberformer")
        if self.frozen_epochs > config.optim.epochs:
            yield Problem("method.frozen_epochs", f"longer than optim.epochs = {config.optim.epochs}; shorten it")


class EmberFormerMethod(Method):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = EmberFormerMethodConfig
    evaluators = ("next_mask",)
    loader = "jepa_jax.projects.wildfire.load_predictor"

    def __init__(self, config: Config, total_steps: int):
        super().__init__(config, total_steps)
        frozen = round(self.config.frozen_epochs / config.optim.epochs * total_steps) if config.optim.epochs else 0
        temporal, spatial = self.config.lr_temporal, self.config.lr_spatial
        self.param_groups = (
            # The classifier starts at random whatever was loaded, so it is never frozen.
            ParamGroup("^refinement/|^decoder/(head/)?classifier/", lr=spatial),
            ParamGroup("^decoder/", lr=spatial, frozen_steps=frozen),
            # What has the rate of `optim` is no group, as in the checkpoints of earlier versions.
            *(() if temporal == config.optim.lr else (ParamGroup("", lr=temporal),)),
        )

    def init(self, key: jax.Array, sample: Batch) -> EmberFormer:
        config = self.run_config
        return EmberFormer(
            config.model,
            sample["static"].shape[-1],
            dtype=DTYPES[config.train.precision],
            remat=config.train.remat,
            rngs=init_rngs(key),
        )

    @functools.cached_property
    def pretrained(self) -> Pretrained:  # type: ignore[override]
        model = self.run_config.model
        path = getattr(model, "decoder_weights", "")
        if not path:
            return Pretrained()
        params, stats, notes = segformer_variables(path, SIZES[model.decoder_size], channels=model.width)
        return Pretrained({"decoder": params}, {"decoder": stats}, tuple(notes))

    def predict(self, model: EmberFormer, batch: Batch, *, train: bool = False) -> Float[Array, "b h w 1"]:
        """Returns the logits of the next mask, in float32."""
        return model(batch, train=train)

    def loss(self, model: EmberFormer, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        del target, key, step
        logits = self.predict(model, batch, train=True)
        with jax.named_scope("loss"):
            loss, terms = mask_loss(logits, batch["target"], batch["known"], self.config.loss)
            burning = jnp.sum(batch["target"] & batch["known"])
            terms["burning"] = burning / jnp.maximum(jnp.sum(batch["known"]), 1)  # share of the known pixels
        return Output(loss, terms)

    def pictures(self, model: EmberFormer, batch: Batch, key: jax.Array) -> UInt8[Array, "v b h w 3"]:
        """Returns the last frames of each history, the truth, the predicted probabilities and the errors.

        See `jepa_jax.projects.wildfire.data.panels`; errors are those at probability 1/2.
        """
        del key
        probability = jax.nn.sigmoid(self.predict(model, batch))[..., 0]
        return jnp.stack(element_panels(batch, probability))
