"""What a family of weights is: the module that they fit, their names, and the images that it reads."""

import contextlib
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.weights.names import Table


class Family(NamedTuple):
    """A model whose weights lie in a file."""

    kind: str  # "vit", "mae", "resnet", the `model.name` of another encoder, or a project's name for its model
    structure: Mapping[str, Any]  # the facts that decide which weights fit, by key of the `model` group
    build: Callable[[], Any]  # returns the module, to be filled with the weights
    table: Table  # the names of the tensors
    image_size: int  # pixels per side of the images that the model was made for; 0 if any
    channels: int  # of the images
    renamed: Mapping[str, str] = {}  # beginnings of names that older libraries wrote, and what they are called today
    no_features: str = ""  # for a model that is no encoder, what it returns instead, as part of an error message


BLOCKS = ("num_hidden_layers", "decoder_num_hidden_layers", "depth", "depths", "layers", "blocks")  # keys: counts
# Keys: pixels per side.
SIDES = ("image_size", "img_size", "view_size", "size", "crop_size", "shorter_side", "shortest_edge", "height")
LARGEST_SIDE = 2**14


@contextlib.contextmanager
def describing(origin: pathlib.Path) -> Iterator[None]:
    """Turns what goes wrong while config.json is interpreted into an error that names the file: others wrote it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        raise UserError(f"{origin.parent}/config.json: describes no model ({reason}); download it again") from error


def check_sizes(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], origin: object) -> None:
    """Raises UserError if a model would have more blocks than there are tensors, or images without a bound."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_sizes(value, tensors, origin)
        numbers = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]
        if key in BLOCKS and sum(numbers) > len(tensors):
            raise UserError(f"{origin}: {key} = {value}: there are {len(tensors)} tensors; download the files again")
        if key in SIDES and numbers and max(numbers) > LARGEST_SIDE:
            raise UserError(f"{origin}: {key} = {value}: more than {LARGEST_SIDE:,} pixels; download the files again")


def needed(config: Mapping[str, Any], key: str, origin: object) -> Any:
    """Returns a value of config.json; raises UserError if it is missing or null."""
    if config.get(key) is None:
        raise UserError(f"{origin}: config.json has no {key}; save the model again with the library that made it")
    return config[key]


def settings(config: Mapping[str, Any], supported: Mapping[str, Any], origin: object) -> None:
    """Raises UserError if config.json asks for something that the modules cannot do."""
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise UserError(f"{origin}: config.json: {key} = {config[key]!r} is not supported; it must be {value!r}")


def section(config: Mapping[str, Any], key: str, origin: object) -> Mapping[str, Any]:
    """Returns an object inside config.json; an empty one if it is missing or null."""
    found = config.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise UserError(f"{origin}: config.json: {key} = {found!r} is not an object; remove it or save the model again")
    return found


def timm_arguments(
    config: Mapping[str, Any], supported: Mapping[str, Any], architectures: str, origin: object
) -> dict[str, Any]:
    """Returns what the config.json of a timm model says of its constructor's arguments; null ones are left out.

    Raises UserError if the model computes something else: its arguments differ from `supported`, or its name does not
    match the pattern `architectures`.
    """
    values = {**config, **section(config, "model_args", origin)}
    arguments = {key: value for key, value in values.items() if value is not None}
    settings(arguments, supported, origin)
    name = str(arguments.get("architecture", ""))
    if name and not re.fullmatch(architectures, name):
        raise UserError(
            f"{origin}: config.json: architecture = {name!r} is not one that is known to compute what the plain "
            "model does; use another model"
        )
    return arguments


def shape_of(tensors: Mapping[str, np.ndarray], name: str, axes: int, origin: object) -> tuple[int, ...]:
    """Returns the shape of a tensor that tells the sizes of a model; raises UserError if it cannot."""
    if name not in tensors:
        raise UserError(f"{origin}: the weights do not fit the model; {name} is missing")
    shape = tensors[name].shape
    if len(shape) != axes:
        raise UserError(f"{origin}: the weights do not fit the model; {name} has shape {list(shape)}, not {axes} axes")
    return shape
