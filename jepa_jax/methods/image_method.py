"""Base class of methods that learn an image encoder; a method adds `Keys`, `init` and `loss`."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, UInt8

from jepa_jax.base.errors import UserError
from jepa_jax.config.augment import Operations, ViewGroup
from jepa_jax.config.groups import Config, NamedGroup, crops_name
from jepa_jax.config.schema import Problem, following, key
from jepa_jax.data.augment import (
    Boxes,
    augment_crops,
    augment_views,
    cropped_view,
    fixed_boxes,
    normalise,
    whole_view,
)
from jepa_jax.methods.contract import Batch, Method
from jepa_jax.methods.whole_batch import Encoded, WholeBatchMethod
from jepa_jax.models.heads import Projector
from jepa_jax.models.pooling import EncoderOutputs, PoolingEncoder, pooled
from jepa_jax.models.registry import DTYPES, AttentionEncoder, LayeredEncoder, PatchEncoder, build_encoder
from jepa_jax.models.rngs import init_rngs

Images = UInt8[Array, "b H W c"]
Features = Float[Array, "b f"]


class EncoderWith(nnx.Module):
    """An encoder, which is kept, and the parts that only the loss reads, by name."""

    def __init__(self, encoder: Any, **parts: nnx.Module | nnx.Variable):
        self.encoder = encoder
        for name, part in parts.items():
            setattr(self, name, part)


class ImageMethod(Method):
    """Views, encoder and features. The model that `init` returns must have its encoder as the attribute `encoder`."""

    evaluators: tuple[str, ...] = ("classification", "collapse")

    @property
    def levels(self) -> int:  # type: ignore[override]
        return 2 if self.run_config.eval.crops else 1

    @property
    def level_names(self) -> tuple[str, ...]:
        crops = self.run_config.eval.crops
        return ("whole image", f"mean of {crops} crops") if crops else super().level_names

    @property
    def dtype(self) -> Any:
        """What the model computes in."""
        return DTYPES[self.run_config.train.precision]

    @property
    def view_size(self) -> int:
        return self.run_config.data.view_size

    def encoder(self, sample: Batch, rngs: nnx.Rngs) -> Any:
        """Returns the encoder that `config.model` describes."""
        data, (height, width) = self.run_config.data, sample["image"].shape[1:3]
        if (height, width) != (data.image_size, data.image_size):
            fix = f"set data.image_size = {height}" if height == width else "resize them to squares, or cut them"
            raise UserError(f"config.data.image_size = {data.image_size}: images of {height} x {width} pixels; {fix}")
        return build_encoder(self.run_config, normalise(sample["image"], data.augment.mean, data.augment.std), rngs)

    def batch_views(
        self, batch: Batch, key: jax.Array, count: int, group: str = "", *, first: int = 0
    ) -> Float[Array, "v b h w c"]:
        """Returns random, normalised views of the elements of a batch, of crops that the loader has cut if it has any.

        Args:
          group: name of the group of views that says how they are made; "" for `data.augment`.
          first: number of the first of these views, for a method that takes those of an image one by one.
        """
        augment, operations = self.run_config.data.augment, self.run_config.view_groups[group] if group else None
        crops = batch.get(crops_name(group))
        with jax.named_scope("augment"):
            if crops is None:
                return augment_views(key, batch["image"], augment, count, operations)
            return augment_crops(key, crops[:, first : first + count], augment, operations)

    def whole(self, images: Images, size: int | None = None) -> Float[Array, "b h w c"]:
        """Returns images as they are, normalised; resized to `size` pixels per side if given."""
        return whole_view(images, self.run_config.data.augment, size)

    def features(
        self, model: Any, batch: Batch, *, level: int = 0, normalised: bool = True, train: bool = False
    ) -> Features:
        """Returns what probes and users read from images, in float32.

        Args:
          level: 0 for the whole, unaugmented image; 1 for the mean over the fixed crops that `eval.crops` asks for.
          normalised: False reads before the encoder's last layer norm, which would hide that features are constant.
          train: batch norm uses and updates the statistics of this batch.
        """
        images, augment, encoder = batch["image"], self.run_config.data.augment, model.encoder

        def encoded(view: Float[Array, "b h w c"]) -> Features:
            if not isinstance(encoder, PoolingEncoder):
                return encoder(view, train=train).astype(jnp.float32)
            return self.pooled(encoder.outputs(view, train=train, normalised=normalised))

        if level == 0:
            at_view_size = isinstance(encoder, PatchEncoder) and encoder.evaluated_at_view_size
            size = self.run_config.eval.image_size or (self.view_size if at_view_size else None)
            return encoded(self.whole(images, size))
        boxes = fixed_boxes(images, augment, self.run_config.eval.crops)

        def crop(box: Boxes) -> Float[Array, "b h w c"]:
            return cropped_view(images, augment, box, self.view_size)

        if train:  # batch norm sees all crops at once
            together = jnp.swapaxes(jax.lax.map(crop, boxes), 0, 1)  # [B, V, h, w, C]
            of_crops = encoded(together.reshape(-1, *together.shape[2:]))
            return jnp.mean(of_crops.reshape(*together.shape[:2], -1), axis=1)
        return jnp.mean(jax.lax.map(lambda box: encoded(crop(box)), boxes), axis=0)  # memory holds one crop per image

    def pooled(self, outputs: EncoderOutputs) -> Features:
        """Returns the features that `eval.pool` makes of an encoder's outputs."""
        return pooled(outputs, self.run_config.eval.pool)

    def encode(self, encoder: Any, view: Float[Array, "b h w c"]) -> tuple[Float[Array, "b d"], Features]:
        """Returns what a projector reads of a view in training, and what the online probe reads of the same pass."""
        if not isinstance(encoder, PoolingEncoder):
            features = encoder(view, train=True)
            return features, features
        outputs = encoder.outputs(view, train=True)
        return pooled(outputs, encoder.pool), self.pooled(outputs)

    def embed(self, model: Any, view: Float[Array, "b h w c"]) -> tuple[Features, Float[Array, "b d"]]:
        """Returns features of a view for the online probe, and what the model's `projector` makes of the view."""
        with jax.named_scope("encoder"):
            projected, features = self.encode(model.encoder, view)
        with jax.named_scope("projector"):
            return features, model.projector(projected, train=True)

    def feature_map(self, model: Any, batch: Batch) -> Float[Array, "b rows columns f"] | None:
        """Returns features of each patch; None for an encoder without a grid of patches."""
        if not isinstance(model.encoder, PatchEncoder):
            return None
        return model.encoder.outputs(self.whole(batch["image"], self.view_size)).cells.astype(jnp.float32)

    def layer_features(self, model: Any, batch: Batch, count: int) -> Features | None:
        """Returns pooled features of the last `count` blocks, side by side; None for an encoder without blocks."""
        if not isinstance(model.encoder, LayeredEncoder):
            return None
        outputs = model.encoder.layer_outputs(self.whole(batch["image"], self.view_size), count)
        return jnp.concatenate([self.pooled(one) for one in outputs], axis=-1)

    def attention_maps(self, model: Any, batch: Batch) -> Float[Array, "b heads rows columns"] | None:
        """Returns how much of each patch the heads of the last block read; None for an encoder without attention."""
        if not isinstance(model.encoder, AttentionEncoder):
            return None
        return model.encoder.attention_maps(self.whole(batch["image"], self.view_size))

    def views_by_group(self, batch: Batch, key: jax.Array) -> dict[str, Float[Array, "v b h w c"]]:
        """Returns all views by the name of the group that says how they are made; "" for `data.augment`, the first."""
        views = {"": self.batch_views(batch, key, self.config.num_views or 2)}
        for index, (name, group) in enumerate(self.run_config.view_groups.items(), 1):
            views[name] = self.batch_views(batch, jax.random.fold_in(key, index), group.count, name)
        return views

    def example_views(self, batch: Batch, key: jax.Array) -> Float[Array, "v b h w c"]:
        """Returns random views of each image, all of them at the size of the first."""
        first, *others = self.views_by_group(batch, key).values()
        size = first.shape[2:4]
        resized = [jax.image.resize(v, (*v.shape[:2], *size, v.shape[-1]), "nearest") for v in others]
        return jnp.concatenate([first, *resized])


@dataclasses.dataclass(frozen=True)
class TwoViewConfig(NamedGroup):
    """Base of the groups of methods that take two views of each image."""

    view_groups: tuple[str, ...] = key(
        (),
        "name of the group that says how the second view is made, e.g. second; empty = like the first, by data.augment",
        members=following(ViewGroup, Operations, "data.augment"),
    )

    @property
    def num_views(self) -> int:  # type: ignore[override]
        return 1 if self.view_groups else 2

    def problems(self, config: Config) -> Iterator[Problem]:
        if len(self.view_groups) > 1:
            yield Problem(
                "method.view_groups", "data.augment makes one of the two views and a group the other; name one"
            )


class ProjectorMethod(WholeBatchMethod, ImageMethod):
    """Learns an encoder from views of an image, through `method.projector`, which only the loss reads.

    Two views, unless `encode_batch` is replaced.
    """

    heads_of_batch = ("projector", "predictor")

    def init(self, key: jax.Array, sample: Batch) -> EncoderWith:
        rngs = init_rngs(key)
        encoder = self.encoder(sample, rngs)
        return EncoderWith(encoder, **self.heads(encoder.feature_dim, rngs))

    def heads(self, features: int, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """Returns the parts behind an encoder with so many features, by name."""
        return {"projector": Projector(features, self.config.projector, dtype=self.dtype, rngs=rngs)}

    def encode_batch(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Encoded:
        del target, step
        return self.encode_views(model.encoder, self.two_views(batch, key))

    def two_views(self, batch: Batch, key: jax.Array) -> list[Float[Array, "b h w c"]]:
        """Returns the two views of `TwoViewConfig`."""
        return [view for views in self.views_by_group(batch, key).values() for view in views]

    def encode_views(self, encoder: Any, views: Iterable[Float[Array, "b h w c"]], name: str = "encoder") -> Encoded:
        """Returns what the projector reads of each view, and the features of the first one; `name` is the profile's."""
        with jax.named_scope(name):
            encoded = [self.encode(encoder, view) for view in views]
        return Encoded(tuple(read for read, _ in encoded), encoded[0][1])

    def project(self, model: Any, encoded: Iterable[Features]) -> list[Float[Array, "b d"]]:
        """Returns what the model's projector makes of each view."""
        with jax.named_scope("projector"):
            return [model.projector(view, train=True) for view in encoded]


class PredictorMethod(ProjectorMethod):
    """Learns an encoder by predicting projections of one view from those of another; see `method.predictor`."""

    def heads(self, features: int, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        heads, width = super().heads(features, rngs), self.config.projector[-1]
        return heads | {"predictor": Projector(width, (self.config.predictor, width), dtype=self.dtype, rngs=rngs)}
