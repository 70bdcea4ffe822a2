"""Fits the variables of a saved encoder to the encoder of a config: same structure, other image size or channels."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.models.positions import interpolated
from jepa_jax.models.registry import encoder_kind
from jepa_jax.weights.load import LoadedModel

# Keys that a name such as vit_tiny or resnet18 stands for, by the name that takes any values of them.
SIZES = {"vit": ("width", "depth", "heads", "mlp_width"), "resnet": ("blocks", "widths", "bottleneck", "width")}


def fit_encoder(
    saved: LoadedModel, structure: Mapping[str, Any], channels: int, params: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the trained variables for an encoder of this structure, and sentences that say what was changed.

    `params` are the variables of that encoder, or their shapes. If the structures differ, UserError has the flags that
    make them equal.
    """
    own, notes = dict(saved.params), []  # raises for a model without features
    check_structure(saved, structure)
    if saved.structure.get("cls_token") and not structure["cls_token"]:
        own.pop("cls_token")
        if "position" in own:
            own["position"] = np.asarray(own["position"])[:, 1:]
        notes.append("The CLS token was left out, since model.cls_token is False.")
    if "position" in own and own["position"].shape != params["position"].shape:
        cls = int(structure["cls_token"])  # whose position stays as it is
        first, rest = np.split(np.asarray(own["position"]), [cls], axis=1)
        resize = functools.partial(interpolated, antialias=saved.encoder.antialias)
        old, new = math.isqrt(rest.shape[1]), math.isqrt(params["position"].shape[1] - cls)
        own["position"] = np.concatenate([first, np.asarray(resize(jnp.asarray(rest), new, new))], axis=1)
        notes.append(f"Positions were interpolated from {old} x {old} to {new} x {new} patches (bicubic).")
    if saved.channels != channels:
        notes.append(_adapt_first_layer(own, saved, channels))
    return own, notes


def check_structure(saved: LoadedModel, structure: Mapping[str, Any]) -> None:
    """Raises UserError with the flags that are needed if an encoder of this structure cannot have the variables."""
    wanted, kind = dict(saved.structure), saved.encoder_kind
    if encoder_kind(structure, structure.get("name", "")) != kind:
        raise UserError(
            f"config.model.init_from = {str(saved.origin)!r}: weights of another kind of encoder ({kind}); "
            f"set {_flags(kind, wanted)}"
        )
    if "cls_token" in wanted and not structure["cls_token"]:
        wanted["cls_token"] = False  # can be left out
    if wanted.get("layer_scale") and structure.get("layer_scale"):
        wanted["layer_scale"] = structure["layer_scale"]  # an initial value, which the weights replace
    differing = {name: value for name, value in wanted.items() if structure.get(name) != value}
    if not differing:
        return
    sizes = SIZES.get(kind, ())
    resized = bool(differing.keys() & set(sizes))
    flags = ({name: wanted[name] for name in sizes} if resized else {}) | differing
    facts = ", ".join(f"{name} = {structure.get(name)} instead of {wanted[name]}" for name in differing)
    raise UserError(
        f"config.model.init_from = {str(saved.origin)!r}: the encoder of the config differs from that of the weights "
        f"({facts}); set {_flags(kind if resized else '', flags)}"
    )


def _flags(name: str, facts: Mapping[str, Any]) -> str:
    values = ({"name": name} if name else {}) | dict(facts)
    lists = {key: value if isinstance(value, tuple | list) else [value] for key, value in values.items()}
    return " ".join(f"--config.model.{key}={','.join(map(str, value))}" for key, value in lists.items())


def _adapt_first_layer(params: dict[str, Any], saved: LoadedModel, channels: int) -> str:
    """Adapts the kernel that reads pixels to another number of channels, in place; returns what was done."""
    if "patch_embed" in params and saved.structure.get("embedding") == "linear":
        side = saved.structure["patch_size"]
        kernel = np.asarray(params["patch_embed"]["kernel"])
        new, sentence = adapt_channels(kernel.reshape(side, side, saved.channels, -1), channels)
        params["patch_embed"] = {**params["patch_embed"], "kernel": new.reshape(-1, kernel.shape[-1])}
    elif "stem" in params and "conv" in params["stem"]:
        new, sentence = adapt_channels(np.asarray(params["stem"]["conv"]["kernel"]), channels)
        params["stem"] = {**params["stem"], "conv": {"kernel": new}}
    else:
        raise UserError(
            f"config.model.init_from = {str(saved.origin)!r}: the first layer of this encoder is fixed to images of "
            f"{saved.channels} channels; set data.channels = {saved.channels}"
        )
    return sentence


def adapt_channels(kernel: np.ndarray, channels: int) -> tuple[np.ndarray, str]:
    """Returns a first-layer kernel [h, w, I, O] for `channels` inputs, and a sentence that says what was done.

    Every new channel gets the mean over the old ones, times old / new: an image whose channels are all equal gives the
    same outputs as before, and the scale of the outputs stays.
    """
    old = kernel.shape[2]
    if channels == old:
        return kernel, f"The input layer reads {old} channels, as it was saved."
    mean = kernel.mean(axis=2, keepdims=True) * (old / channels)
    sentence = (
        f"The input layer was adapted from {old} to {channels} channels: "
        f"each gets the mean over the {old} saved ones times {old}/{channels}."
    )
    return np.repeat(mean, channels, axis=2), sentence
