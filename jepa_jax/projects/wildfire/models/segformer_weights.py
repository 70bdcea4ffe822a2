"""`SegformerForSemanticSegmentation` as transformers saves it: names, sizes, and the model with these weights."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json
from jepa_jax.models.rngs import init_rngs
from jepa_jax.projects.wildfire.models.segformer import SegFormer, SegFormerSize
from jepa_jax.weights.family import Family, describing
from jepa_jax.weights.fit import adapt_channels
from jepa_jax.weights.names import Rule, Table, batch_norm, both, convolution, dense, load_into, norm
from jepa_jax.weights.reader import TENSORS, read_tensors, tensor_file

ARCHITECTURE = "SegformerForSemanticSegmentation"

_BLOCK, _OUR_BLOCK = "segformer.encoder.block.{i}.{j}", "encoder.stages.{i}.blocks.{j}"

TABLE: Table = (
    *both("segformer.encoder.patch_embeddings.{i}.proj", "encoder.stages.{i}.embed", convolution),
    *norm("segformer.encoder.patch_embeddings.{i}.layer_norm", "encoder.stages.{i}.embed_norm"),
    *norm(f"{_BLOCK}.layer_norm_1", f"{_OUR_BLOCK}.norm1"),
    *both(f"{_BLOCK}.attention.self.query", f"{_OUR_BLOCK}.attention.query", dense),
    *both(f"{_BLOCK}.attention.self.key", f"{_OUR_BLOCK}.attention.key_value", dense),
    *both(f"{_BLOCK}.attention.self.value", f"{_OUR_BLOCK}.attention.key_value", dense),
    *both(f"{_BLOCK}.attention.self.sr", f"{_OUR_BLOCK}.attention.reduce", convolution),
    *norm(f"{_BLOCK}.attention.self.layer_norm", f"{_OUR_BLOCK}.attention.reduce_norm"),
    *both(f"{_BLOCK}.attention.output.dense", f"{_OUR_BLOCK}.attention.out", dense),
    *norm(f"{_BLOCK}.layer_norm_2", f"{_OUR_BLOCK}.norm2"),
    *both(f"{_BLOCK}.mlp.dense1", f"{_OUR_BLOCK}.up", dense),
    *both(f"{_BLOCK}.mlp.dwconv.dwconv", f"{_OUR_BLOCK}.depthwise", convolution),
    *both(f"{_BLOCK}.mlp.dense2", f"{_OUR_BLOCK}.down", dense),
    *norm("segformer.encoder.layer_norm.{i}", "encoder.stages.{i}.norm"),
    *both("decode_head.linear_c.{i}.proj", "head.project.{i}", dense),
    Rule("decode_head.linear_fuse.weight", "head.fuse", dense),
    *batch_norm("decode_head.batch_norm", "head.norm"),
    *both("decode_head.classifier", "head.classifier", dense),
)

# Tensors, and their axes, that tell how many channels a saved model reads and how many classes it knows.
_CHANNELS = ("segformer.encoder.patch_embeddings.0.proj.weight", 1)
_CLASSES = ("decode_head.classifier.weight", 0)


def load_segformer(
    path: str | os.PathLike[str], size: SegFormerSize | None = None, *, channels: int | None = None
) -> tuple[SegFormer, list[str]]:
    """Returns a SegFormer with public weights, and sentences that say what was changed.

    Args:
        path: a directory that transformers saved, with config.json and model.safetensors, or a .safetensors file.
        size: sizes of the model, which a file alone does not tell; those of a directory must be the same, apart from
            strides, which no weight depends on.
        channels: of the images, if they are not those of the saved model: see `adapt_channels`.

    Raises:
        UserError: a file is missing or damaged, or its tensors do not fit its config.json or `size`.
    """
    with describing(pathlib.Path(path) / TENSORS):
        saved = _segformer_size(read_config(path), path) if pathlib.Path(path).is_dir() else size
    if saved is None:
        raise UserError(f"{path}: give the directory with config.json; a file alone does not tell the model's sizes")
    if size is not None and dataclasses.replace(saved, strides=size.strides) != size:
        raise UserError(f"{path}/config.json: the weights are of {saved}, not of {size}; use the size they are of")
    tensors = read_tensors(path)
    saved_channels, classes = (_length(tensors, path, *axis) for axis in (_CHANNELS, _CLASSES))
    model = nnx.eval_shape(
        lambda: SegFormer(size or saved, classes=classes, channels=saved_channels, rngs=init_rngs(0))
    )
    load_into(model, tensors, TABLE, tensor_file(path))
    changes = []
    if channels not in (None, saved_channels):
        first = model.encoder.stages[0].embed
        kernel, sentence = adapt_channels(np.asarray(first.kernel[...]), channels)
        first.kernel = nnx.Param(jnp.asarray(kernel))
        changes.append(sentence)
    return model, changes


def segformer_variables(
    path: str | os.PathLike[str], size: SegFormerSize, *, channels: int
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Returns parameters and statistics of `load_segformer` without the classifier's, and what was changed."""
    model, changes = load_segformer(path, size, channels=channels)
    params, stats = (nnx.to_pure_dict(nnx.state(model, kind)) for kind in (nnx.Param, nnx.BatchStat))
    del params["head"]["classifier"]
    notes = [f"SegFormer weights were loaded from {tensor_file(path)}.", *changes, "Its classifier starts at random."]
    return jax.tree.map(np.asarray, params), jax.tree.map(np.asarray, stats), notes


def segformer(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], origin: pathlib.Path) -> Family:
    """Returns what the config.json of a SegFormer describes; without dropout, since it is not trained."""
    size = _segformer_size(config, origin.parent)
    channels, classes = (_length(tensors, origin, *axis) for axis in (_CHANNELS, _CLASSES))

    def build() -> SegFormer:
        return SegFormer(size, classes=classes, channels=channels, rngs=init_rngs(0))

    no_features = "a SegFormer gives logits per pixel, not features of images"
    return Family("segformer", {}, build, TABLE, 0, channels, no_features=no_features)


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the config.json of a directory; raises UserError if it is missing or describes another architecture."""
    path = pathlib.Path(directory) / "config.json"
    config = read_json(path, "give a directory as transformers saves it: config.json beside model.safetensors")
    found = config.get("architectures")
    if found != [ARCHITECTURE]:
        raise UserError(f"{path}: architectures = {found}; weights of {ARCHITECTURE} are needed here")
    return config


def _length(tensors: Mapping[str, np.ndarray], path: str | os.PathLike[str], name: str, axis: int) -> int:
    if name not in tensors or tensors[name].ndim <= axis:
        raise UserError(f"{path}: has no tensor {name}; weights of {ARCHITECTURE} are needed here")
    return tensors[name].shape[axis]


def _segformer_size(config: Mapping[str, Any], directory: str | os.PathLike[str]) -> SegFormerSize:
    """Returns the sizes of a SegFormer from its config.json."""
    supported = {"hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise UserError(f"{directory}/config.json: {key} = {config[key]!r} is not supported; it must be {value!r}")
    names = {
        "widths": "hidden_sizes", "depths": "depths", "heads": "num_attention_heads", "reductions": "sr_ratios",
        "mlp_ratios": "mlp_ratios", "patch_sizes": "patch_sizes", "strides": "strides",
    }  # fmt: skip
    try:
        return SegFormerSize(
            **{ours: tuple(config[theirs]) for ours, theirs in names.items()}, head_width=config["decoder_hidden_size"]
        )
    except KeyError as error:
        raise UserError(
            f"{directory}/config.json: {error} is missing; save the model again with transformers"
        ) from None
