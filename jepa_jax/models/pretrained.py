"""Models made from public weights: sizes from config.json, parameters from safetensors."""

import os
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.models.segformer import SegFormer, SegFormerSize
from jepa_jax.models.vit import linear
from jepa_jax.weights.adapt import adapt_channels
from jepa_jax.weights.names import load_into
from jepa_jax.weights.reader import read_config, read_tensors, tensor_file
from jepa_jax.weights.segformer import ARCHITECTURE, TABLE


def load_segformer(
    directory: str | os.PathLike[str],
    *,
    channels: int | None = None,
    classes: int | None = None,
    dtype: Any = jnp.float32,
    remat: bool = False,
    rngs: nnx.Rngs,
) -> tuple[SegFormer, list[str]]:
    """Returns the SegFormer of a directory that transformers saved, and sentences that say what was changed.

    Args:
        directory: holds config.json and model.safetensors.
        channels: of the images, if they are not those of the saved model: see `adapt_channels`.
        classes: of the logits, if not those of the saved model: the classifier then starts from random weights.
        dtype: what is computed in; parameters are float32.
        remat: whether the backward pass recomputes the inside of each block.
        rngs: for the random weights and for dropout.

    Raises:
        UserError: a file is missing or damaged, or its tensors do not fit its config.json.
    """
    config = read_config(directory, ARCHITECTURE)
    size = _segformer_size(config, directory)
    model = SegFormer(
        size, classes=len(config["id2label"]), channels=config["num_channels"], drop_path=config["drop_path_rate"],
        dropout=config["classifier_dropout_prob"], dtype=dtype, remat=remat, rngs=rngs,
    )  # fmt: skip
    load_into(model, read_tensors(directory), TABLE, tensor_file(directory))
    changes = []
    if channels not in (None, config["num_channels"]):
        first = model.encoder.stages[0].embed
        kernel, sentence = adapt_channels(np.asarray(first.kernel[...]), channels)
        first.kernel = nnx.Param(jnp.asarray(kernel))
        changes.append(sentence)
    if classes not in (None, len(config["id2label"])):
        model.head.classifier = linear(size.head_width, classes, dtype, rngs)
        changes.append(
            f"The classifier of {len(config['id2label'])} classes was replaced by a random one of {classes}."
        )
    return model, changes


def _segformer_size(config: dict[str, Any], directory: str | os.PathLike[str]) -> SegFormerSize:
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
