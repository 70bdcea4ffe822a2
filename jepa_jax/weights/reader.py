"""Reads public checkpoints: safetensors files and the config.json beside them. Pickles are never loaded."""

import os
import pathlib
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json

_SAVE = "save it again with save_pretrained(directory, safe_serialization=True)"


def read_config(directory: str | os.PathLike[str], architecture: str) -> dict[str, Any]:
    """Returns the config.json of a directory.

    Raises:
        UserError: it is missing, or describes another architecture.
    """
    path = pathlib.Path(directory) / "config.json"
    config = read_json(path, "give a directory as transformers saves it: config.json beside model.safetensors")
    found = config.get("architectures")
    if found != [architecture]:
        raise UserError(f"{path}: architectures = {found}; weights of {architecture} are needed here")
    return config


def read_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns the tensors of a .safetensors file, or of the model.safetensors of a directory, by name.

    Raises:
        UserError: there is no such file, or it is not a complete safetensors file.
    """
    path = tensor_file(path)
    try:
        return load_file(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error
    except SafetensorError as error:
        raise UserError(f"{path}: not a complete safetensors file ({error}); download it again or {_SAVE}") from error
    except (KeyError, TypeError) as error:  # a type of numbers that numpy does not have
        raise UserError(f"{path}: holds numbers of type {error}; save the weights as float32") from error


def tensor_file(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the safetensors file that `path` names: the file itself, or the model.safetensors of a directory."""
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "model.safetensors"
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: only .safetensors files are read, because loading a pickle can run code; {_SAVE}")
    if not path.is_file():
        raise UserError(f"{path}: not found; give a .safetensors file or a directory with model.safetensors")
    return path
