"""What a family of weights is: the module that they fit, their names, and the images that it reads."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.weights.names import Table


class Family(NamedTuple):
    """A model whose weights lie in a file.

    Attributes:
        kind: "vit", "mae", "resnet", "segformer", or the `model.name` of another encoder.
        structure: the facts that decide which weights fit, by key of the `model` group.
        build: returns the module, to be filled with the weights.
        table: the names of the tensors.
        image_size: pixels per side of the images that the model was made for; 0 if any.
        channels: of the images.
        renamed: beginnings of names that earlier versions of a library wrote, and what they are called today.
    """

    kind: str
    structure: Mapping[str, Any]
    build: Callable[[], Any]
    table: Table
    image_size: int
    channels: int
    renamed: Mapping[str, str] = {}


def needed(config: Mapping[str, Any], key: str, origin: object) -> Any:
    """Returns a value of config.json; raises UserError if it is missing."""
    if key not in config:
        raise UserError(f"{origin}: config.json has no {key}; save the model again with the library that made it")
    return config[key]


def settings(config: Mapping[str, Any], supported: Mapping[str, Any], origin: object) -> None:
    """Raises UserError if config.json asks for something that the modules cannot do."""
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise UserError(f"{origin}: config.json: {key} = {config[key]!r} is not supported; it must be {value!r}")


def shape_of(tensors: Mapping[str, np.ndarray], name: str, axes: int, origin: object) -> tuple[int, ...]:
    """Returns the shape of a tensor that tells the sizes of a model; raises UserError if it cannot."""
    if name not in tensors:
        raise UserError(f"{origin}: the weights do not fit the model; {name} is missing")
    shape = tensors[name].shape
    if len(shape) != axes:
        raise UserError(f"{origin}: the weights do not fit the model; {name} has shape {list(shape)}, not {axes} axes")
    return shape
