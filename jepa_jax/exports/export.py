"""The encoder of a run in a form that others can use: our safetensors, a directory for transformers, or StableHLO."""

import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import make_folder, user_path, write_atomically
from jepa_jax.evals.inference import FrozenEncoder, load_encoder
from jepa_jax.exports.model_card import Exported, model_card
from jepa_jax.models.kernels import without_gpu_kernels
from jepa_jax.models.positions import sincos_positions
from jepa_jax.models.registry import encoder_structure
from jepa_jax.models.resnet import BOTTLENECK_EXPANSION, ResNet
from jepa_jax.models.vit import ViT
from jepa_jax.weights import resnet, vit
from jepa_jax.weights.load import FORMAT, VERSION, Geometry
from jepa_jax.weights.names import saved_tensors

STABLEHLO = "encoder.stablehlo"
PLATFORMS = ("cpu", "cuda")
KNOWN_FILES = {"README.md", "config.json", "model.safetensors", "preprocessor_config.json", STABLEHLO}
_OTHER = "use --format=safetensors or --format=stablehlo"
Files = dict[str, bytes]


def export_encoder(workdir: str | pathlib.Path, format: str, output: str | pathlib.Path) -> Exported:
    """Writes the evaluated encoder of a run into a folder that is new or holds an export, with a model card."""
    if format not in FORMATS:
        raise UserError(f"--format={format}: not one of {', '.join(FORMATS)}")
    folder = user_path(output, "--output")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output={folder}: is a file; give a folder")
    if others := sorted({path.name for path in folder.iterdir()} - KNOWN_FILES) if folder.is_dir() else []:
        raise UserError(f"--output={folder}: holds other files ({', '.join(others[:3])}); give a new folder")
    encoder = load_encoder(workdir)
    of_images = "image" in encoder.inputs
    if not of_images and format != "stablehlo":
        takes = ", ".join(encoder.inputs)
        raise UserError(f"--format={format}: is for encoders of images, this one takes {takes}; use stablehlo")
    files = FORMATS[format](encoder)
    record = Exported(
        folder, format, {name: len(content) for name, content in files.items()},
        {name: hashlib.sha256(files[name]).hexdigest() for name in ("model.safetensors", STABLEHLO) if name in files},
        encoder.feature_dim, input_size(encoder) if of_images else 0, encoder.channels if of_images else 0,
        {name: f"{one.dtype} [{', '.join(map(str, ('B', *one.shape)))}]" for name, one in encoder.inputs.items()},
    )  # fmt: skip
    files["README.md"] = model_card(pathlib.Path(workdir), encoder.config, record).encode()
    make_folder(folder)
    for name, content in files.items():
        write_atomically(folder / name, content)
    return record


def input_size(encoder: FrozenEncoder) -> int:
    """Returns the pixels per side that images have when they enter the module itself."""
    config, module = encoder.config, encoder.module
    at_view_size = getattr(module, "evaluated_at_view_size", False)
    return config.eval.image_size or (config.data.view_size if at_view_size else config.data.image_size)


def safetensors_files(encoder: FrozenEncoder) -> Files:
    """Returns the encoder under our own names, and the config.json from which `load_model` rebuilds it."""
    config = encoder.config
    described = {
        "format": FORMAT,
        "version": VERSION,
        "model": config.to_dict()["model"] | ({"init_from": ""} if hasattr(config.model, "init_from") else {}),
        "view_size": config.data.view_size,
        "image_size": input_size(encoder),  # these three: see `Geometry`
        "crop_size": encoder.image_size,
        "shorter_side": config.data.shorter_side or encoder.image_size,
        "channels": encoder.channels,
        "mean": config.data.augment.mean,
        "std": config.data.augment.std,
        "pool": config.eval.pool,
        "precision": config.train.precision,
    }
    tensors = saved_tensors(encoder.module, None)
    return {"model.safetensors": save(tensors, {"format": FORMAT}), "config.json": _json(described)}


def hf_files(encoder: FrozenEncoder) -> Files:
    """Returns the encoder under the names of transformers, with configs of the model and of its images."""
    config = encoder.config
    model, tensors = transformers_files(
        encoder.module, encoder_structure(config.model), image_size=config.data.view_size, channels=encoder.channels
    )
    augment, size = config.data.augment, input_size(encoder)
    seen = Geometry(encoder.image_size, shorter_side=config.data.shorter_side).at(size)  # one resizing, not two
    images = {
        "image_processor_type": "BitImageProcessor",  # the one that crops the centre in every version
        "do_convert_rgb": encoder.channels == 3,
        "do_resize": True, "size": {"shortest_edge": seen.shorter_side}, "resample": 2,
        "do_center_crop": True, "crop_size": {"height": size, "width": size},
        "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": augment.mean, "image_std": augment.std,
    }  # fmt: skip
    return {
        "model.safetensors": save(tensors, {"format": "pt"}),
        "config.json": _json(model),
        "preprocessor_config.json": _json(images),
    }


def transformers_files(
    encoder: Any, structure: Mapping[str, Any], *, image_size: int, channels: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the config.json and the tensors of the model of transformers that gives the same outputs."""
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
    rotary, registers, gated = structure["positions"] == "rotary", structure["registers"], structure["mlp"] == "swiglu"
    if (rotary or registers or gated) and not scaled:
        raise UserError(f"--format=hf: rotary positions, registers and SwiGLU need model.layer_scale above 0; {_OTHER}")
    if scaled and not structure["cls_token"]:
        raise UserError(f"--format=hf: LayerScale needs a CLS token; {_OTHER}")
    if rotary:
        return _dinov3(encoder, structure, image_size, channels)
    mlp = structure["mlp_width"]
    ratios = [r for r in range(1, 17) if (vit.swiglu_width(r * width) if gated else r * width) == mlp]
    if scaled and not ratios:
        raise UserError(f"--format=hf: no whole mlp_ratio of transformers makes model.mlp_width = {mlp}; {_OTHER}")
    name, kind = ("ViTModel", "vit") if structure["cls_token"] else ("IJepaModel", "ijepa")
    if scaled:
        name, kind = (vit.DINOV2[1], "dinov2_with_registers") if registers else (vit.DINOV2[0], "dinov2")
    config: dict[str, Any] = {
        "architectures": [name], "model_type": kind, "hidden_act": "gelu", "hidden_size": width,
        "num_hidden_layers": structure["depth"], "num_attention_heads": structure["heads"],
        "image_size": image_size, "patch_size": structure["patch_size"], "num_channels": channels,
        "layer_norm_eps": structure["norm_eps"], "qkv_bias": structure["qkv_bias"],
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dtype": "float32",
    }  # fmt: skip
    scaling = {"layerscale_value": structure["layer_scale"], "use_swiglu_ffn": gated, "use_mask_token": False}
    scaling |= {"num_register_tokens": registers} if registers else {}
    config |= {"mlp_ratio": ratios[0], **scaling} if scaled else {"intermediate_size": mlp}
    if encoder.position is None:  # transformers keeps fixed positions as tensors
        positions = sincos_positions(encoder.grid, encoder.feature_dim)
        encoder = nnx.clone(encoder)
        encoder.position = nnx.data(nnx.Param(jnp.pad(positions, ((encoder.num_cls, 0), (0, 0)))[None]))
    table = vit.hf_table(structure["patch_size"], names=vit.dinov2_names(structure["mlp"]) if scaled else vit.HF_NAMES)
    tensors = saved_tensors(encoder, table)
    if registers:  # transformers reads one, and uses it for masked training alone
        tensors["embeddings.mask_token"] = np.zeros((1, width), np.float32)
    return config, tensors


def _dinov3(
    encoder: ViT, structure: Mapping[str, Any], image_size: int, channels: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    gated, width, biased = structure["mlp"] == "swiglu", structure["width"], structure["qkv_bias"]
    config = {
        "architectures": ["DINOv3ViTModel"], "model_type": "dinov3_vit", "hidden_act": "silu" if gated else "gelu",
        "hidden_size": width, "intermediate_size": structure["mlp_width"], "use_gated_mlp": gated,
        "num_hidden_layers": structure["depth"], "num_attention_heads": structure["heads"],
        "image_size": image_size, "patch_size": structure["patch_size"], "num_channels": channels,
        "num_register_tokens": structure["registers"], "rope_theta": structure["rope_base"],
        "layerscale_value": structure["layer_scale"], "layer_norm_eps": structure["norm_eps"],
        "query_bias": biased, "key_bias": biased, "value_bias": biased, "proj_bias": True, "mlp_bias": True,
        "dtype": "float32",
    }  # fmt: skip
    unused = {"embeddings.mask_token": np.zeros((1, 1, width), np.float32)}  # transformers reads one
    if not structure["registers"]:
        unused["embeddings.register_tokens"] = np.zeros((1, 0, width), np.float32)
    return config, saved_tensors(encoder, vit.dinov3_table(structure, key_bias=biased)) | unused


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


def stablehlo_files(encoder: FrozenEncoder) -> Files:
    """Returns one function with its weights, for any batch: uint8 images [b, H, W, C] to features [b, F].

    An encoder of other elements takes a dict of arrays.
    """
    program, config, inputs = encoder.program, encoder.config, encoder.inputs
    of_images = list(inputs) == ["image"]
    variables = jax.tree.map(np.asarray, (encoder.params, encoder.stats))

    def features(elements: Any) -> jax.Array:
        params, stats = jax.tree.map(jnp.asarray, variables)  # constants of the program
        batch = {"image": elements} if of_images else elements
        return program.encoder_method.features(program.factory.merge(params, stats), batch)

    (count,) = jax.export.symbolic_shape("b")
    shapes = {name: jax.ShapeDtypeStruct((count, *one.shape), one.dtype) for name, one in inputs.items()}
    with without_gpu_kernels():
        function = jax.export.export(jax.jit(features), platforms=PLATFORMS)
        artifact = function(shapes["image"] if of_images else shapes)
    taken = {name: f"{one.dtype} {list(map(str, one.shape))}" for name, one in shapes.items()}
    described = {
        "format": "stablehlo", "file": STABLEHLO, "platforms": PLATFORMS,
        "input": taken["image"] if of_images else taken,
        "output": f"float32 ['b', {encoder.feature_dim}]", "pool": config.eval.pool,
    }  # fmt: skip
    return {STABLEHLO: bytes(artifact.serialize()), "config.json": _json(described)}


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


FORMATS: Mapping[str, Callable[[FrozenEncoder], Files]] = {
    "safetensors": safetensors_files,
    "hf": hf_files,
    "stablehlo": stablehlo_files,
}
