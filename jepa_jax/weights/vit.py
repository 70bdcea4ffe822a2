"""Vision transformers as transformers and timm save them: names of their tensors, and the modules that they fit.

Of transformers: `ViTModel` and `ViTForImageClassification`, `IJepaModel`, `Dinov2Model` and
`Dinov2WithRegistersModel`, `DINOv3ViTModel`, `ViTMAEForPreTraining`. Of timm: `VisionTransformer`, with or without
class token and LayerScale.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from jepa_jax.base.errors import UserError
from jepa_jax.models.predictor import Predictor
from jepa_jax.models.rngs import init_rngs
from jepa_jax.models.tokens import Patches, patch_statistics, patchify, take_tokens
from jepa_jax.models.vit import BlockOptions, ViT
from jepa_jax.weights.family import Family, needed, settings, shape_of, timm_arguments
from jepa_jax.weights.names import Layout, Rule, Table, both, dense, norm, patches, unchanged, unneeded

DINOV2 = ("Dinov2Model", "Dinov2WithRegistersModel")
TIMM_HEADS = {"tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16}  # by a word of the architecture's name
# Names of timm without a word for another norm, attention, activation, position or parallel blocks.
_TIMM_NAMES = r"(vit|deit|deit3)_[a-z]+_patch\d+(_gap)?_(\d+|dinov2)(_(in21k|in21ft1k|dino|miil|sam))?"
_TIMM_FIXED = {"act_layer": "gelu", "norm_layer": "layernorm", "mlp_layer": "mlp", "block_fn": "block"}
_WITHOUT_CLS = Layout(lambda position: np.pad(position, ((0, 0), (1, 0), (0, 0))), lambda position: position[:, 1:])
_FIXED = {"hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


# What libraries call the layers of a block, and what they are called here.
_HF_ATTENTION = {
    **{f"attention.attention.{part}": "attention.qkv" for part in ("query", "key", "value")},
    "attention.output.dense": "attention.out",
}
_NORMS_AND_MLP = {"norm1": "norm1", "norm2": "norm2", "mlp.fc1": "up", "mlp.fc2": "down"}
HF_NAMES = _HF_ATTENTION | {
    "layernorm_before": "norm1", "layernorm_after": "norm2", "intermediate.dense": "up", "output.dense": "down",
}  # fmt: skip
_SCALES = {f"layer_scale{i}.lambda1": f"scale{i}" for i in (1, 2)}
_DINOV2 = _HF_ATTENTION | _NORMS_AND_MLP | _SCALES
_DINOV2_SWIGLU = _HF_ATTENTION | _SCALES | {
    "norm1": "norm1", "norm2": "norm2", "mlp.weights_in": "up", "mlp.weights_out": "down",
}  # fmt: skip
_DINOV3 = _SCALES | {"norm1": "norm1", "norm2": "norm2", "attention.o_proj": "attention.out", "mlp.down_proj": "down"}
_TIMM = {"attn.qkv": "attention.qkv", "attn.proj": "attention.out", "ls1.gamma": "scale1", "ls2.gamma": "scale2"}
_TIMM |= _NORMS_AND_MLP


def _block(layer: str, block: str, names: Mapping[str, str]) -> list[Rule]:
    rules: list[Rule] = []
    for theirs, ours in names.items():
        source, target = f"{layer}.{theirs}", f"{block}.{ours}"
        if ours.startswith("scale"):
            rules.append(Rule(source, target))
        else:
            rules += norm(source, target) if ours.startswith("norm") else both(source, target, dense)
    return rules


def hf_table(patch_size: int, *, prefix: str = "", ours: str = "", names: Mapping[str, str] = HF_NAMES) -> Table:
    """Returns the names of a ViT of transformers; names of the file begin with `prefix`, ours with `ours`."""
    embeddings = f"{prefix}embeddings"
    return (
        Rule(f"{embeddings}.cls_token", f"{ours}cls_token"),
        Rule(f"{embeddings}.register_tokens", f"{ours}registers"),
        Rule(f"{embeddings}.position_embeddings", f"{ours}position"),
        *both(f"{embeddings}.patch_embeddings.projection", f"{ours}patch_embed", patches(patch_size)),
        *_block(f"{prefix}encoder.layer.{{i}}", f"{ours}blocks.{{i}}", names),
        *norm(f"{prefix}layernorm", f"{ours}norm"),
        *unneeded(f"{embeddings}.mask_token", "pooler.dense.weight", "pooler.dense.bias"),
        *unneeded("classifier.weight", "classifier.bias"),
    )


def swiglu_width(hidden: int) -> int:
    """Returns how wide gate and value of DINOv2 are: two thirds of what the config says, a multiple of 8."""
    return (int(hidden * 2 / 3) + 7) // 8 * 8


def dinov2_names(mlp: str) -> Mapping[str, str]:
    """Returns what DINOv2 calls the layers of a block with this perceptron."""
    return _DINOV2_SWIGLU if mlp == "swiglu" else _DINOV2


def dinov3_table(facts: Mapping[str, Any], *, key_bias: bool) -> Table:
    """Returns the names of DINOv3; without `key_bias`, queries and values have a bias and keys have none."""
    width = facts["width"]
    half = width // 2  # the bias of keys is half beside that of queries, and half beside that of values

    def beside(position: int) -> Layout:
        own = slice(0, width) if position == 0 else slice(half, None)
        zeros = [(0, half) if position == 0 else (half, 0)]
        return Layout(lambda bias: np.pad(bias, zeros), lambda bias: bias[own])

    layer, block = "layer.{i}", "blocks.{i}"
    qkv, up = f"{block}.attention.qkv", ("gate_proj", "up_proj") if facts["mlp"] == "swiglu" else ("up_proj",)
    biases = {part: unchanged for part in "qkv"} if key_bias else {part: beside(i) for i, part in enumerate("qv")}
    return (
        Rule("embeddings.cls_token", "cls_token"),
        Rule("embeddings.register_tokens", "registers" if facts["registers"] else None),
        *both("embeddings.patch_embeddings", "patch_embed", patches(facts["patch_size"])),
        *(Rule(f"{layer}.attention.{part}_proj.weight", f"{qkv}.kernel", dense) for part in "qkv"),
        *(Rule(f"{layer}.attention.{part}_proj.bias", f"{qkv}.bias", layout) for part, layout in biases.items()),
        *(rule for part in up for rule in both(f"{layer}.mlp.{part}", f"{block}.up", dense)),
        *_block(layer, block, _DINOV3),
        *norm("norm", "norm"),
        *unneeded("embeddings.mask_token"),
    )


def _mae_table(patch_size: int) -> Table:
    return (
        *hf_table(patch_size, prefix="vit.", ours="encoder."),
        *both("decoder.decoder_embed", "decoder.embed", dense),
        Rule("decoder.mask_token", "decoder.mask_token"),
        Rule("decoder.decoder_pos_embed", "decoder.position"),
        *_block("decoder.decoder_encoder.layer.{i}", "decoder.blocks.{i}", HF_NAMES),
        *norm("decoder.decoder_norm", "decoder.norm"),
        *both("decoder.decoder_pred", "decoder.out", dense),
    )


def _timm_table(patch_size: int, position: Layout) -> Table:
    return (
        Rule("cls_token", "cls_token"),
        Rule("pos_embed", "position", position),
        *both("patch_embed.proj", "patch_embed", patches(patch_size)),
        *_block("blocks.{i}", "blocks.{i}", _TIMM),
        *norm("norm", "norm"),
        *unneeded("head.weight", "head.bias"),
    )


class MaeOutputs(NamedTuple):
    """What a masked autoencoder gives for images and noise."""

    logits: Patches  # predicted patches, all of them, row by row
    mask: Float[Array, "b n"]  # 1 for hidden patches, 0 for visible ones
    ids_restore: Integer[Array, "b n"]  # where each patch lies in the order of its noise
    loss: Float[Array, ""]  # mean squared error of the hidden patches


class MaeModel(nnx.Module):
    """Encodes the patches with the least noise and predicts all of them.

    Attributes:
      mask_ratio: part of the patches that is hidden.
      norm_pix: whether patches are predicted in units of their own mean and deviation.
    """

    def __init__(self, encoder: ViT, decoder: Predictor, *, mask_ratio: float, norm_pix: bool):
        self.encoder, self.decoder = encoder, decoder
        self.mask_ratio, self.norm_pix = mask_ratio, norm_pix

    def __call__(self, images: Float[Array, "b h w c"], noise: Float[Array, "b n"]) -> MaeOutputs:
        order = jnp.argsort(noise, axis=1)
        restore = jnp.argsort(order, axis=1)
        visible, hidden = jnp.split(order, [int(noise.shape[1] * (1 - self.mask_ratio))], axis=1)
        outputs = self.encoder.encode(self.encoder.embed(images, visible))
        leading, context = jnp.split(outputs, [self.encoder.num_leading], axis=1)
        predicted = self.decoder(context, visible, hidden, leading=leading, with_context=True)
        logits = take_tokens(predicted, restore)
        mask = (restore >= visible.shape[1]).astype(jnp.float32)
        wanted = patchify(images, self.encoder.patch_size)
        if self.norm_pix:
            mean, deviation = patch_statistics(wanted)
            wanted = (wanted - mean) / deviation
        errors = jnp.mean(jnp.square(logits - wanted), axis=-1)
        return MaeOutputs(logits, mask, restore, jnp.sum(errors * mask) / jnp.sum(mask))


def hf_vit(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], origin: object) -> Family:
    """Returns what the config.json of a ViT of transformers describes."""
    del tensors
    architecture = config["architectures"][0]
    dinov2, mae = architecture in DINOV2, architecture == "ViTMAEForPreTraining"
    settings(config, _FIXED | {"apply_layernorm": True} | ({} if dinov2 else {"use_swiglu_ffn": False}), origin)
    width, patch_size = needed(config, "hidden_size", origin), _side(config, "patch_size", origin)
    mlp_width = needed(config, "mlp_ratio", origin) * width if dinov2 else needed(config, "intermediate_size", origin)
    mlp = "swiglu" if config.get("use_swiglu_ffn") else "gelu"
    if mlp == "swiglu":
        mlp_width = swiglu_width(int(mlp_width))
    facts = {
        "width": width, "depth": needed(config, "num_hidden_layers", origin),
        "heads": _fitting(needed(config, "num_attention_heads", origin), width, "num_attention_heads", origin),
        "mlp_width": int(mlp_width), "mlp": mlp, "patch_size": patch_size,
        "registers": needed(config, "num_register_tokens", origin) if architecture == DINOV2[1] else 0,
        "cls_token": architecture != "IJepaModel", "positions": "learned", "embedding": "linear",
        "layer_scale": config.get("layerscale_value", 1.0) if dinov2 else 0.0,
        "qkv_bias": config.get("qkv_bias", True), "norm_eps": needed(config, "layer_norm_eps", origin),
    }  # fmt: skip
    image_size, channels = _side(config, "image_size", origin), config.get("num_channels", 3)
    if mae:
        return Family("mae", facts, lambda: _mae(config, facts, image_size, channels, origin), _mae_table(patch_size),
                      image_size, channels, {"decoder.decoder_layers.": "decoder.decoder_encoder.layer."})  # fmt: skip
    prefix = "vit." if architecture == "ViTForImageClassification" else ""
    table = hf_table(patch_size, prefix=prefix, names=dinov2_names(mlp) if dinov2 else HF_NAMES)
    antialias = architecture == DINOV2[1]  # as transformers resizes positions, which differs by class

    def build() -> ViT:
        return vit_module(facts, image_size, channels, antialias=antialias)

    return Family("vit", facts, build, table, image_size, channels)


def hf_dinov3(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], origin: object) -> Family:
    """Returns what the config.json of a DINOv3 ViT of transformers describes."""
    del tensors
    gated = config.get("use_gated_mlp", False)
    biased = config.get("query_bias", True)
    fixed = {"value_bias": biased, "proj_bias": True, "mlp_bias": True, "attention_dropout": 0.0}
    settings(config, fixed | {"hidden_act": "silu" if gated else "gelu", "apply_layernorm": True}, origin)
    width, patch_size = needed(config, "hidden_size", origin), _side(config, "patch_size", origin)
    facts = {
        "width": width, "depth": needed(config, "num_hidden_layers", origin),
        "heads": _fitting(needed(config, "num_attention_heads", origin), width, "num_attention_heads", origin),
        "mlp_width": needed(config, "intermediate_size", origin), "mlp": "swiglu" if gated else "gelu",
        "patch_size": patch_size, "registers": config.get("num_register_tokens", 0), "cls_token": True,
        "positions": "rotary", "rope_base": float(config.get("rope_theta", 100.0)), "embedding": "linear",
        "layer_scale": config.get("layerscale_value", 1.0), "qkv_bias": biased,
        "norm_eps": needed(config, "layer_norm_eps", origin),
    }  # fmt: skip
    image_size, channels = _side(config, "image_size", origin), config.get("num_channels", 3)
    table = dinov3_table(facts, key_bias=config.get("key_bias", False))
    return Family("vit", facts, lambda: vit_module(facts, image_size, channels), table, image_size, channels)


def vit_module(facts: Mapping[str, Any], image_size: int, channels: int, *, antialias: bool = True) -> ViT:
    """Returns the ViT that `ViT.structure` facts describe, to be filled with weights."""
    options = BlockOptions.of(facts)
    return ViT(
        facts["width"], facts["depth"], facts["heads"], image_size=image_size, patch_size=facts["patch_size"],
        pool="cls" if facts["cls_token"] else "mean", cls_token=facts["cls_token"], positions=facts["positions"],
        registers=facts["registers"], rope_base=facts.get("rope_base", 100.0), antialias=antialias,
        channels=channels, options=options, rngs=init_rngs(0),
    )  # fmt: skip


def _mae(config: Mapping[str, Any], facts: Mapping[str, Any], image_size: int, channels: int, origin: object) -> Any:
    patch_size = facts["patch_size"]
    width, heads = needed(config, "decoder_hidden_size", origin), needed(config, "decoder_num_attention_heads", origin)
    decoder = Predictor(
        facts["width"], channels * patch_size**2, width=width,
        depth=needed(config, "decoder_num_hidden_layers", origin), grid=image_size // patch_size,
        heads=_fitting(heads, width, "decoder_num_attention_heads", origin), stored_positions=True, rngs=init_rngs(0),
        options=BlockOptions(
            needed(config, "decoder_intermediate_size", origin), qkv_bias=facts["qkv_bias"], norm_eps=facts["norm_eps"]
        ),
    )  # fmt: skip
    encoder = vit_module(facts, image_size, channels, antialias=False)
    mask_ratio, norm_pix = (needed(config, key, origin) for key in ("mask_ratio", "norm_pix_loss"))
    return MaeModel(encoder, decoder, mask_ratio=mask_ratio, norm_pix=norm_pix)


def timm_vit(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], origin: object) -> Family:
    """Returns what a ViT of timm is: from its constructor's arguments in config.json, or else from its tensors."""
    arguments = timm_arguments(config, _TIMM_FIXED, _TIMM_NAMES, origin)
    embedding = shape_of(tensors, "patch_embed.proj.weight", 4, origin)
    places = shape_of(tensors, "pos_embed", 3, origin)
    numbers = {int(found[1]) for name in tensors if (found := re.match(r"blocks\.(\d+)\.", name))}
    width, patch_size = arguments.get("embed_dim", embedding[0]), embedding[-1]
    cls_token = arguments.get("class_token", "cls_token" in tensors or not config)
    grid = math.isqrt(places[1])
    scaled = any(".ls1." in name for name in tensors)
    hidden = arguments.get("mlp_ratio")
    facts = {
        "width": width, "depth": arguments.get("depth", len(numbers)),
        "heads": _fitting(_timm_heads(arguments, origin), width, "num_heads", origin),
        "mlp_width": int(hidden * width) if hidden else shape_of(tensors, "blocks.0.mlp.fc1.weight", 2, origin)[0],
        "mlp": "gelu", "registers": 0, "patch_size": patch_size,
        "cls_token": cls_token, "positions": "learned", "embedding": "linear",
        "layer_scale": arguments.get("init_values", 1.0) if scaled else 0.0,
        "qkv_bias": arguments.get("qkv_bias", "blocks.0.attn.qkv.bias" in tensors or not config), "norm_eps": 1e-6,
    }  # fmt: skip
    size = arguments.get("img_size", grid * patch_size)
    image_size = size if isinstance(size, int) else size[0]
    # Some models give no position to the class token: for them it is zero.
    with_zero = cls_token and places[1] == (image_size // patch_size) ** 2
    position = _WITHOUT_CLS if with_zero else unchanged
    table, channels = _timm_table(patch_size, position), embedding[1]
    return Family("vit", facts, lambda: vit_module(facts, image_size, channels), table, image_size, channels)


def _timm_heads(arguments: Mapping[str, Any], origin: object) -> int:
    """Returns the number of heads, which no tensor tells."""
    if "num_heads" in arguments:
        return arguments["num_heads"]
    name = str(arguments.get("architecture", ""))
    for word, heads in TIMM_HEADS.items():
        if f"_{word}_patch" in name:
            return heads
    raise UserError(
        f"{origin}: config.json has neither num_heads nor a known architecture; write the constructor's arguments "
        'of the model into config.json, e.g. {"num_heads": 12}'
    )


def _fitting(heads: int, width: int, key: str, origin: object) -> int:
    """Returns the number of heads; raises UserError if they cannot share the width equally."""
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise UserError(f"{origin}: config.json: {key} = {heads!r} does not divide the width of {width}; correct it")
    return heads


def _side(config: Mapping[str, Any], name: str, origin: object) -> int:
    """Returns a size in pixels that a config may give as one number or as two equal ones."""
    value = needed(config, name, origin)
    sides = {value} if isinstance(value, int) else set(value)
    if len(sides) != 1:
        raise UserError(f"{origin}: {name} = {value} is not square; use a model of square images and patches")
    return sides.pop()
