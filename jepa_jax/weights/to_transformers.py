"""Encoders of ours as models of transformers: `ViTModel`, `IJepaModel`, `Dinov2Model` and `ResNetModel`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.models.resnet import BOTTLENECK_EXPANSION, ResNet
from jepa_jax.models.vit import ViT, sincos_positions
from jepa_jax.weights import resnet, vit
from jepa_jax.weights.names import saved_tensors

_OTHER = "use --format=safetensors or --format=stablehlo"


def transformers_files(
    encoder: Any, structure: Mapping[str, Any], *, image_size: int, channels: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the config.json and the tensors of the model of transformers that gives the same outputs.

    Args:
        encoder: a ViT or ResNet.
        structure: see `jepa_jax.models.registry.Encoder`.
        image_size: pixels per side that its positions are meant for.

    Raises:
        UserError: transformers has no such model.
    """
    if isinstance(encoder, ViT):
        return _vit(encoder, structure, image_size, channels)
    if isinstance(encoder, ResNet):
        return _resnet(encoder, structure, channels)
    raise UserError(f"--format=hf: transformers has no {type(encoder).__name__}; {_OTHER}")


def _vit(
    encoder: ViT, structure: Mapping[str, Any], image_size: int, channels: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if structure["embedding"] != "linear":
        raise UserError(f"--format=hf: transformers has no patches of model.embedding = whitened; {_OTHER}")
    scaled, width = bool(structure["layer_scale"]), structure["width"]
    if scaled and (not structure["cls_token"] or structure["mlp_width"] % width):
        raise UserError(f"--format=hf: LayerScale needs a CLS token and mlp_width as a multiple of the width; {_OTHER}")
    name = "Dinov2Model" if scaled else "ViTModel" if structure["cls_token"] else "IJepaModel"
    kind = {"Dinov2Model": "dinov2", "ViTModel": "vit", "IJepaModel": "ijepa"}[name]
    config: dict[str, Any] = {
        "architectures": [name], "model_type": kind, "hidden_act": "gelu", "hidden_size": width,
        "num_hidden_layers": structure["depth"], "num_attention_heads": structure["heads"],
        "image_size": image_size, "patch_size": structure["patch_size"], "num_channels": channels,
        "layer_norm_eps": structure["norm_eps"], "qkv_bias": structure["qkv_bias"],
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dtype": "float32",
    }  # fmt: skip
    if scaled:
        ratio = structure["mlp_width"] // width
        config |= {"mlp_ratio": ratio, "layerscale_value": structure["layer_scale"], "use_swiglu_ffn": False}
        config["use_mask_token"] = False
    else:
        config["intermediate_size"] = structure["mlp_width"]
    tensors = saved_tensors(_with_positions(encoder), vit.hf_table(structure["patch_size"], dinov2=scaled))
    return config, tensors


def _with_positions(encoder: ViT) -> ViT:
    """Returns the encoder with fixed positions written out, as transformers keeps them."""
    if encoder.position is not None:
        return encoder
    positions = sincos_positions(encoder.grid, encoder.feature_dim)
    copy = nnx.clone(encoder)
    copy.position = nnx.data(nnx.Param(jnp.pad(positions, ((encoder.num_cls, 0), (0, 0)))[None]))
    return copy


def _resnet(
    encoder: ResNet, structure: Mapping[str, Any], channels: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if structure["stem"] != "imagenet":
        raise UserError(f"--format=hf: ResNets of transformers have model.stem = imagenet; {_OTHER}")
    bottleneck = structure["bottleneck"]
    expansion = BOTTLENECK_EXPANSION if bottleneck else 1
    config = {
        "architectures": ["ResNetModel"], "model_type": "resnet", "hidden_act": "relu", "num_channels": channels,
        "embedding_size": structure["width"], "hidden_sizes": [width * expansion for width in structure["widths"]],
        "depths": list(structure["blocks"]), "layer_type": "bottleneck" if bottleneck else "basic",
        "downsample_in_first_stage": False, "downsample_in_bottleneck": False, "dtype": "float32",
    }  # fmt: skip
    tensors = saved_tensors(encoder, resnet.hf_table(structure["blocks"]))
    counters = {name.replace("running_mean", "num_batches_tracked") for name in tensors if "running_mean" in name}
    return config, tensors | {name: np.array(0, np.int64) for name in sorted(counters)}
