"""What the masked methods share: a ViT, one augmented view of each image, and where its patches are."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jepa_jax.data.augment import augment_views, normalise, whole_view
from jepa_jax.methods import Ema, schedules
from jepa_jax.methods.masking import covers
from jepa_jax.models.registry import DTYPES, build_encoder
from jepa_jax.models.vit import ViT, patchify, unpatchify

HIDDEN_PIXEL = 0.0  # of a normalised picture: the mean colour


class MaskedMethod:
    """Views, encoder and features; see `jepa_jax.methods.Method`. A method adds its model and its loss."""

    levels = 1
    ema: Ema | None = None

    def __init__(self, config: Any):
        self.config = config.method
        self.model = config.model
        self.augment = config.data.augment
        self.precision, self.remat = config.train.precision, config.train.remat
        self.view_size = self.augment.crop.size or config.data.image_size
        self.grid = self.view_size // self.model.patch_size

    def build_encoder(self, sample: jax.Array, rngs: nnx.Rngs) -> ViT:
        encoder = build_encoder(
            self.model,
            normalise(sample, self.augment.mean, self.augment.std),
            view_size=self.view_size,
            precision=self.precision,
            remat=self.remat,
            rngs=rngs,
        )
        assert isinstance(encoder, ViT)  # the config was validated
        return encoder

    def predictor_options(self, rngs: nnx.Rngs) -> dict[str, Any]:
        return {"grid": self.grid, "dtype": DTYPES[self.precision], "remat": self.remat == "full", "rngs": rngs}

    def view(self, images: jax.Array, key: jax.Array) -> jax.Array:
        """One normalised view of each image: [B, h, w, 3]."""
        with jax.named_scope("augment"):
            return augment_views(key, images, self.augment, 1)[0]

    def whole(self, images: jax.Array) -> jax.Array:
        return whole_view(images, self.augment, self.view_size)

    def features(
        self, model: Any, images: jax.Array, *, level: int = 0, normalised: bool = True, train: bool = False
    ) -> jax.Array:
        del level, train
        return model.encoder(self.whole(images), normalised=normalised).astype(jnp.float32)

    def feature_map(self, model: Any, images: jax.Array) -> jax.Array:
        patches = model.encoder.patches(self.whole(images)).astype(jnp.float32)
        return patches.reshape(len(images), self.grid, self.grid, -1)

    def pictures(self, model: Any, images: jax.Array, key: jax.Array) -> jax.Array | None:
        del model, images, key
        return None

    def shown(self, view: jax.Array, index: jax.Array) -> jax.Array:
        """The view with only the patches at `index` [B, ...] visible."""
        visible = jnp.minimum(covers(index, self.grid**2), 1)[..., None]
        size = self.model.patch_size
        return unpatchify(jnp.where(visible > 0, patchify(view, size), HIDDEN_PIXEL), size)


def slow_target(config: Any, total_steps: int) -> Ema | None:
    """The copy of the encoder that a JEPA predicts, with a momentum that rises linearly; None without one."""
    if config.target != "ema":
        return None
    return Ema(("encoder",), schedules.linear(config.ema_start, config.ema_end, total_steps))


def target_patches(model: Any, target: Any, view: jax.Array, kind: str) -> jax.Array:
    """The patch outputs that are to be predicted, for `method.target`: [B, tokens, D]."""
    with jax.named_scope("target"):
        encoder = (target if kind == "ema" else model).encoder
        patches = encoder.patches(view)
        return patches if kind == "shared" else jax.lax.stop_gradient(patches)
