"""Vision transformer: pre-norm, exact GELU; any subset of an image's patches can be encoded.

Positions are learned, fixed sines and cosines of row and column, or rotations of queries and keys (DINOv3). They cover
an image of any size: the positions of the size that the encoder was built for are interpolated. A CLS token and
registers, tokens that belong to no patch and are not read, are optional.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

from jepa_jax.config.groups import Config, EncoderGroup
from jepa_jax.config.schema import Group, Problem, key
from jepa_jax.models.kernels.attention import AUTO, IMPLEMENTATIONS, self_attention, store_gradient
from jepa_jax.models.kernels.linear import linear, row_major
from jepa_jax.models.kernels.mlp import mlp, swiglu
from jepa_jax.models.kernels.norm import LayerNorm
from jepa_jax.models.pooling import EncoderOutputs, pooled
from jepa_jax.models.positions import Rotation, interpolated, rotary, rotated, sincos_positions
from jepa_jax.models.remat import rematerialized
from jepa_jax.models.tokens import patchify, take_tokens
from jepa_jax.models.whitening import WhitenedPatches

Images = Float[Array, "b h w c"]
Tokens = Float[Array, "b n d"]
Places = Integer[Array, "b m"]

SIZES = {  # width, depth, heads
    "vit_tiny": (192, 12, 3),
    "vit_small": (384, 12, 6),
    "vit_base": (768, 12, 12),
    "vit_large": (1024, 24, 16),
}


@dataclasses.dataclass(frozen=True)
class CustomVitKeys(Group):
    """Sizes of a ViT that has no size of its own by name."""

    width: int = key(128, "numbers per token", least=4)
    depth: int = key(4, "blocks", least=1)
    heads: int = key(4, "attention heads", least=1)
    mlp_width: int = key(
        0, "numbers between the two layers of the perceptron (MLP) of each block; 0 = 4 x model.width", least=0
    )

    def problems(self, config: Config) -> Iterator[Problem]:
        if self.width % self.heads or self.width % 4:
            yield Problem("model.width", f"must be a multiple of 4 and of model.heads = {self.heads}")


@dataclasses.dataclass(frozen=True)
class WhitenedKeys(Group):
    filter_size: int = key(5, "pixels per side of a whitening filter", least=2)
    filters: int = key(64, "whitening filters", least=1)

    def problems(self, config: Config) -> Iterator[Problem]:
        directions = config.data.channels * self.filter_size**2
        if not self.filter_size < config.model.patch_size:
            fix = f"model.patch_size = {config.model.patch_size}"
            yield Problem(
                "model.filter_size", f"a filter must find at least 2 x 2 places in a patch; use less than {fix}"
            )
        if self.filters > directions:
            yield Problem("model.filters", f"a window has {directions} principal directions; use at most that")


@dataclasses.dataclass(frozen=True)
class RotaryKeys(Group):
    rope_base: float = key(100.0, "ratio of the longest to the shortest wave of rotary positions, almost", least=1)

    def problems(self, config: Config) -> Iterator[Problem]:
        width, _, heads = SIZES.get(config.model.name) or (config.model.width, 0, config.model.heads)
        if width // heads % 4:
            yield Problem("model.positions", f"rotary needs a multiple of 4 numbers per head, not {width // heads}")


@dataclasses.dataclass(frozen=True)
class VitConfig(EncoderGroup):
    name: str = key(
        "vit_tiny", "size of the encoder; vit takes its own", variants={**dict.fromkeys(SIZES), "vit": CustomVitKeys}
    )
    patch_size: int = key(8, "pixels per side of a patch", least=1)
    pool: str = key("mean", "what a projector reads: the CLS token or the mean of patches", choices=("cls", "mean"))
    cls_token: bool = key(True, "whether there is a token beside those of the patches")
    registers: int = key(0, "tokens beside those of the patches that nothing reads", least=0)
    positions: str = key(
        "learned",
        "trained, fixed sines and cosines, or rotary: queries and keys of patches are rotated by row and column",
        variants={"learned": None, "sincos": None, "rotary": RotaryKeys},
    )
    embedding: str = key(
        "linear",
        "how patches become tokens: by a linear map of their pixels, or of fixed whitening filters and a ReLU",
        variants={"linear": None, "whitened": WhitenedKeys},
    )
    drop_path: float = key(
        0.0, "share of images that skip a branch of the last block in training; earlier blocks less", least=0, most=0.99
    )
    mlp: str = key(
        "gelu", "perceptron of a block: GELU, or SwiGLU, which has a gate as wide as it", choices=("gelu", "swiglu")
    )
    layer_scale: float = key(0.0, "initial factor of each branch of a block, trained per channel; 0 = none", least=0)
    qkv_bias: bool = key(True, "whether queries, keys and values have a bias")
    norm_eps: float = key(1e-6, "added to the variance by layer norms", least=0)
    attention: str = key(
        AUTO,
        "how NVIDIA GPUs from Ampere on compute attention: by cuDNN, by a kernel of this package, or by XLA, which "
        "writes the matrix of scores; auto takes the first that applies; plans for other machines never take cuDNN",
        choices=IMPLEMENTATIONS,
    )

    def problems(self, config: Config) -> Iterator[Problem]:
        if self.pool == "cls" and not self.cls_token:
            yield Problem("model.pool", "there is no CLS token; use mean, or set model.cls_token = True")
        for size in config.view_sizes:
            if size % self.patch_size:
                fix = "set model.patch_size or the size of the crop"
                yield Problem("model.patch_size", f"does not divide the {size}-pixel views; {fix}")
        if config.eval.image_size % self.patch_size:
            yield Problem("eval.image_size", f"is no multiple of model.patch_size = {self.patch_size}")


class BlockOptions(NamedTuple):
    """What differs between families of ViTs inside of their blocks, as the keys of these names say."""

    mlp_width: int = 0
    mlp: str = "gelu"
    qkv_bias: bool = True
    layer_scale: float = 0.0
    norm_eps: float = 1e-6
    attention: str = AUTO

    @classmethod
    def of(cls, facts: Mapping[str, Any], attention: str = AUTO) -> "BlockOptions":
        """Returns the options of an encoder that `ViT.structure` describes."""
        return cls(**{name: facts[name] for name in cls._fields[:-1]}, attention=attention)


DEFAULT_OPTIONS = BlockOptions()


class Hidden(NamedTuple):
    """Patches whose content is replaced; their positions stay."""

    places: Bool[Array, "b n"]
    token: Float[Array, " d"]


class Attention(nnx.Module):
    """Multi-head self-attention with one fused projection for queries, keys and values."""

    def __init__(
        self, width: int, heads: int, *, qkv_bias: bool = True, implementation: str = AUTO, dtype: Any, rngs: nnx.Rngs
    ):
        self.heads, self.implementation = heads, implementation
        self.qkv = linear(width, 3 * width, dtype, rngs, bias=qkv_bias)
        self.out = linear(width, width, dtype, rngs)

    def __call__(self, x: Tokens, rotation: Rotation | None = None) -> Tokens:
        return self.out(self_attention(self._projected(x, rotation), self.implementation).reshape(x.shape))

    def weights(self, x: Tokens, rotation: Rotation | None = None) -> Float[Array, "b heads n n"]:
        """Returns how much of each token (last axis) every token reads, per head; the weights of a token sum to 1."""
        q, k, _ = jnp.split(self._projected(x, rotation), 3, axis=2)
        scores = jnp.einsum("bnhd,bmhd->bhnm", q, k, preferred_element_type=jnp.float32)
        return jax.nn.softmax(scores / math.sqrt(q.shape[-1]), axis=-1)

    def _projected(self, x: Tokens, rotation: Rotation | None) -> Float[Array, "b n heads per_head"]:
        """Returns the heads of queries, then those of keys, then those of values."""
        batch, length, width = x.shape
        projected = store_gradient(self.qkv(x)).reshape(batch, length, 3 * self.heads, width // self.heads)
        if rotation is None:
            return projected
        of_patches, values = jnp.split(projected, [2 * self.heads], axis=2)
        return jnp.concatenate([rotated(of_patches, rotation), values], axis=2)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with LayerScale, both branches times trained factors.

    In training a share `drop_path` of the images skips each of the two branches (stochastic depth); the others get it
    scaled up, so that its expectation stays.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        options: BlockOptions = DEFAULT_OPTIONS,
        drop_path: float = 0.0,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        hidden = options.mlp_width or 4 * width
        self.norm1 = LayerNorm(width, epsilon=options.norm_eps, dtype=dtype, rngs=rngs)
        self.attention = Attention(
            width, heads, qkv_bias=options.qkv_bias, implementation=options.attention, dtype=dtype, rngs=rngs
        )
        self.norm2 = LayerNorm(width, epsilon=options.norm_eps, dtype=dtype, rngs=rngs)
        self.gated = options.mlp == "swiglu"
        self.up = linear(width, hidden * (2 if self.gated else 1), dtype, rngs)  # of a gated one: the gate first
        self.down = linear(hidden, width, dtype, rngs)
        factors = [nnx.Param(jnp.full(width, options.layer_scale)) if options.layer_scale else None for _ in range(2)]
        self.scale1, self.scale2 = factors
        self.drop = (
            nnx.Dropout(drop_path, broadcast_dims=(1, 2), rngs=nnx.Rngs(dropout=rngs.params())) if drop_path else None
        )

    def __call__(self, x: Tokens, rotation: Rotation | None = None, *, train: bool = False) -> Tokens:
        x = x + self._kept(self.attention(self.norm1(x), rotation), self.scale1, train)
        perceptron = swiglu if self.gated else mlp
        return x + self._kept(perceptron(self.norm2(x), self.up, self.down), self.scale2, train)

    def _kept(self, branch: Tokens, scale: nnx.Param | None, train: bool) -> Tokens:
        if scale is not None:
            branch = branch * scale[...].astype(branch.dtype)
        return self.drop(branch) if train and self.drop is not None else branch


class ViT(nnx.Module):
    """Maps images to the CLS token, or to the mean over patches."""

    Keys = VitConfig
    evaluated_at_view_size = True  # patches have the scale that they were trained at

    def __init__(
        self,
        width: int,
        depth: int,
        heads: int,
        *,
        image_size: int,
        patch_size: int,
        pool: str = "mean",
        cls_token: bool = True,
        positions: str = "learned",
        registers: int = 0,
        rope_base: float = 100.0,
        antialias: bool = True,
        channels: int = 3,
        whitened: WhitenedPatches | None = None,
        options: BlockOptions = DEFAULT_OPTIONS,
        drop_path: float = 0.0,
        dtype: Any = jnp.float32,
        remat: str = "none",
        rngs: nnx.Rngs,
    ):
        self.image_size, self.patch_size, self.pool, self.remat = image_size, patch_size, pool, remat
        self.feature_dim = width
        self.pools = ("mean", "grid2", "cls") if cls_token else ("mean", "grid2")
        self.grid = image_size // patch_size
        self.num_cls, self.num_leading = int(cls_token), int(cls_token) + registers
        self.positions, self.antialias = positions, antialias
        self.rope_base, self.head_dim = rope_base, width // heads
        initial = nnx.initializers.truncated_normal(0.02)
        self.whitened = nnx.data(whitened)
        self.patch_embed = linear(whitened.outputs if whitened else channels * patch_size**2, width, dtype, rngs)
        if cls_token:
            self.cls_token = nnx.Param(initial(rngs.params(), (1, 1, width)), decay=False)
        if registers:
            self.registers = nnx.Param(initial(rngs.params(), (1, registers, width)), decay=False)
        learned = (1, self.grid**2 + self.num_cls, width)
        self.position = nnx.Param(initial(rngs.params(), learned), decay=False) if positions == "learned" else None
        rates = np.linspace(0, drop_path, depth) if depth > 1 else [drop_path]
        self.blocks = nnx.List([
            Block(width, heads, options=options, drop_path=float(p), dtype=dtype, rngs=rngs) for p in rates
        ])  # fmt: skip
        self.norm = LayerNorm(width, epsilon=options.norm_eps, dtype=dtype, rngs=rngs)

    @classmethod
    def from_config(
        cls, config: Any, sample: Images, *, view_size: int, dtype: Any, remat: str, rngs: nnx.Rngs
    ) -> "ViT":
        facts = cls.structure(config)
        options = BlockOptions.of(facts, config.attention)
        whitened = None
        if config.embedding == "whitened":
            whitened = WhitenedPatches(
                sample,
                patch_size=config.patch_size,
                filter_size=config.filter_size,
                filters=config.filters,
                dtype=dtype,
            )
        return cls(
            facts["width"], facts["depth"], facts["heads"], image_size=view_size, patch_size=config.patch_size,
            pool=config.pool, cls_token=config.cls_token, positions=config.positions,
            registers=config.registers, rope_base=facts.get("rope_base", 100.0), channels=sample.shape[-1],
            whitened=whitened, options=options, drop_path=config.drop_path, dtype=dtype, remat=remat, rngs=rngs,
        )  # fmt: skip

    @classmethod
    def structure(cls, config: Any) -> dict[str, Any]:
        width, depth, heads = SIZES.get(config.name) or (config.width, config.depth, config.heads)
        mlp_width = getattr(config, "mlp_width", 0) or 4 * width
        names = ("patch_size", "cls_token", "registers", "positions", "embedding", "mlp", "layer_scale", "qkv_bias")
        names = (*names, "norm_eps", *(("rope_base",) if config.positions == "rotary" else ()))
        filters = ("filter_size", "filters") if config.embedding == "whitened" else ()
        sizes = {"width": width, "depth": depth, "heads": heads, "mlp_width": mlp_width}
        return sizes | {name: getattr(config, name) for name in (*names, *filters)}

    def describe(self, images: Images, keep: Places | None = None) -> Float[Array, "b n numbers"]:
        """Returns patches before anything trained reads them: their pixels, or whitened ones.

        An encoder and its slow copy share them, so that nothing here may be trained.
        """
        patches = patchify(images, self.patch_size)
        if keep is not None:  # dropped before anything is computed of them
            patches = take_tokens(patches, keep)
        return patches if self.whitened is None else self.whitened(patches)

    def embed(
        self,
        images: Images,
        keep: Places | None = None,
        described: Float[Array, "b all numbers"] | None = None,
        hidden: Hidden | None = None,
    ) -> Tokens:
        """Returns patch tokens with positions, without CLS, of all patches or of those at `keep`.

        Args:
          described: what `describe` returns for all patches, if it is known already.
        """
        if described is None:
            described = self.describe(images, keep)
        elif keep is not None:
            described = take_tokens(described, keep)
        tokens = self.patch_embed(described)
        if hidden is not None:
            tokens = jnp.where(hidden.places[..., None], hidden.token.astype(tokens.dtype), tokens)
        if self.positions == "rotary":
            return tokens
        positions = self._positions(images.shape[1] // self.patch_size, images.shape[2] // self.patch_size)
        if keep is not None:
            positions = take_tokens(jnp.broadcast_to(positions, (len(images), *positions.shape[1:])), keep)
        return tokens + positions.astype(tokens.dtype)

    def rotation(self, images: Images, keep: Integer[Array, "several m"] | None = None) -> Rotation | None:
        """Returns how attention rotates the tokens of all patches, or of each row of `keep`; None without rotary."""
        if self.positions != "rotary":
            return None
        rows, columns = images.shape[1] // self.patch_size, images.shape[2] // self.patch_size
        parts = [jnp.asarray(part)[None] for part in rotary(rows, columns, self.head_dim, self.rope_base)]
        if keep is not None:
            parts = [take_tokens(jnp.broadcast_to(part, (len(keep), *part.shape[1:])), keep) for part in parts]
        return Rotation(*parts)

    def encode(
        self, tokens: Tokens, rotation: Rotation | None = None, *, train: bool = False, normalised: bool = True
    ) -> Float[Array, "b m d"]:
        """Returns outputs for embedded tokens, `num_leading` of CLS and registers in front; see `rotation`."""
        x = run_blocks(self.blocks, self._with_leading(tokens), remat=self.remat, rotation=rotation, train=train)
        return self.norm(x) if normalised else x

    def tokens(
        self, images: Images, *, train: bool = False, normalised: bool = True, hidden: Hidden | None = None
    ) -> Float[Array, "b m d"]:
        embedded = self.embed(images, hidden=hidden)
        return self.encode(embedded, self.rotation(images), train=train, normalised=normalised)

    def _with_leading(self, tokens: Tokens) -> Float[Array, "b m d"]:
        leading = []
        if self.num_cls:
            leading.append(self.cls_token[...] + (0 if self.position is None else self.position[:, :1]))
        if self.num_leading > self.num_cls:
            leading.append(self.registers[...])
        shared = [jnp.broadcast_to(x.astype(tokens.dtype), (tokens.shape[0], *x.shape[1:])) for x in leading]
        return jnp.concatenate([*shared, tokens], axis=1) if shared else tokens

    def attention_maps(self, images: Images) -> Float[Array, "b heads rows columns"]:
        """Returns how much of each patch the last block reads, per head: for CLS, or else as the mean over patches."""
        *blocks, last = self.blocks
        first, rotation = self.num_leading, self.rotation(images)
        x = run_blocks(blocks, self._with_leading(self.embed(images)), remat="none", rotation=rotation)
        weights = last.attention.weights(last.norm1(x), rotation)
        read = weights[:, :, 0, first:] if self.num_cls else jnp.mean(weights[:, :, first:, first:], axis=2)
        return read.reshape(*read.shape[:2], images.shape[1] // self.patch_size, images.shape[2] // self.patch_size)

    def patches(
        self, images: Images, *, described: Float[Array, "b all numbers"] | None = None, train: bool = False
    ) -> Tokens:
        """Returns outputs of the patches alone; for the arguments see `embed`."""
        tokens = self.embed(images, described=described)
        return self.encode(tokens, self.rotation(images), train=train)[:, self.num_leading :]

    def outputs(
        self, images: Images, *, train: bool = False, normalised: bool = True, hidden: Hidden | None = None
    ) -> EncoderOutputs:
        tokens = self.tokens(images, train=train, normalised=normalised, hidden=hidden)
        return self._on_grid(images, tokens)

    def layer_outputs(self, images: Images, count: int) -> list[EncoderOutputs]:
        """Returns the outputs of the last `count` blocks, each after the last norm."""
        first, rotation = max(0, len(self.blocks) - count), self.rotation(images)
        x = self._with_leading(self.embed(images))
        x, found = run_blocks(self.blocks[:first], x, remat="none", rotation=rotation), []
        for block in self.blocks[first:]:
            x = block(x, rotation)
            found.append(self._on_grid(images, self.norm(x)))
        return found

    def _on_grid(self, images: Images, tokens: Float[Array, "b m d"]) -> EncoderOutputs:
        rows, columns = images.shape[1] // self.patch_size, images.shape[2] // self.patch_size
        cells = tokens[:, self.num_leading :].reshape(images.shape[0], rows, columns, self.feature_dim)
        return EncoderOutputs(cells, tokens[:, 0] if self.num_cls else None)

    def __call__(self, images: Images, *, train: bool = False) -> Float[Array, "b d"]:
        return pooled(self.outputs(images, train=train), self.pool)

    def _positions(self, rows: int, columns: int) -> Float[Array, "1 patches d"]:
        """Returns the positions of an image of so many patches, without that of CLS."""
        if self.position is None:
            return jnp.asarray(sincos_positions(self.grid, self.feature_dim, (rows, columns)))[None]
        return interpolated(self.position[:, self.num_cls :], rows, columns, antialias=self.antialias)


def run_blocks(
    blocks: Iterable[Block], x: Tokens, *, remat: str, rotation: Rotation | None = None, train: bool = False
) -> Tokens:
    """Applies blocks one after the other; the backward pass recomputes what `remat` says of each."""
    run = rematerialized(lambda block, x: block(x, rotation, train=train), remat)
    x = row_major(x)
    for block in blocks:
        x = run(block, x)
    return row_major(x)
