"""Reads checkpoints: safetensors files and the config.json beside them. Pickles are never loaded."""

import os
import pathlib
import re
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jepa_jax.base.classes import import_extra
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import file_digest, read_json, user_path

HUB = "hub:"
TENSORS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
CARD = "README.md"
STATED = re.compile(r"^- SHA-256 of (\S+): ([0-9a-f]{64})", re.MULTILINE)  # file, digest
_SAVE = "save it again with save_pretrained(directory, safe_serialization=True)"
Path = str | os.PathLike[str]


def located(source: Path) -> pathlib.Path:
    """Returns the local path of weights; downloads `hub:OWNER/NAME` from the Hugging Face Hub, unless it is cached."""
    text = os.fspath(source)
    if not text.startswith(HUB):
        path = user_path(text, "weights")
        if not path.exists():
            raise UserError(
                f"{text}: no such file or folder; for weights of the Hugging Face Hub write {HUB}OWNER/NAME"
            )
        return path
    hub = import_extra("huggingface_hub", text, "hub")
    try:
        found = hub.snapshot_download(text.removeprefix(HUB), allow_patterns=["*.json", "*.safetensors"])
    except Exception as error:  # of the network, of the name, of the disk: many classes of several packages
        reason = str(error).strip().partition("\n")[0]
        fix = "check the name and the network, or give a local folder"
        raise UserError(f"{text}: cannot be downloaded ({type(error).__name__}: {reason}); {fix}") from error
    return pathlib.Path(found)


def read_optional(path: pathlib.Path, name: str = CONFIG) -> dict[str, Any]:
    """Returns a JSON file of a directory, or of the directory of a file of tensors; {} if there is none."""
    found = (path if path.is_dir() else path.parent) / name
    return read_json(found, "save the model again") if found.is_file() else {}


def check_card(origin: pathlib.Path) -> None:
    """Raises UserError if files of weights have not the SHA-256 that the model card beside them states, if it does."""
    card = origin.with_name(CARD)
    stated = dict(STATED.findall(card.read_text(errors="replace"))) if card.is_file() else {}
    for file in weight_files(origin):
        if file.name in stated and file_digest(file, "sha256") != stated[file.name]:
            raise UserError(f"{file}: is not the file that {CARD} describes (another SHA-256); export or copy it again")


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a .safetensors file, or of the model.safetensors of a directory, by name.

    A directory may also hold several files and an index of them, as transformers saves large models.
    """
    tensors: dict[str, np.ndarray] = {}
    for file in weight_files(tensor_file(path)):
        try:
            tensors |= load_file(file)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror or error}); check the path") from error
        except SafetensorError as error:
            fix = f"download it again or {_SAVE}"
            raise UserError(f"{file}: not a complete safetensors file ({error}); {fix}") from error
        except (KeyError, TypeError) as error:  # a type of numbers that numpy does not have
            raise UserError(f"{file}: holds numbers of type {error}; save the weights as float32") from error
    return tensors


def weight_files(origin: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that hold the tensors of what `tensor_file` found: itself, or those that an index lists."""
    if origin.name != INDEX:
        return [origin]
    fix = "download the files again"
    parts = read_json(origin, fix).get("weight_map")
    if not isinstance(parts, dict) or not parts:
        raise UserError(f"{origin}: has no weight_map, which names the file of each tensor; {fix}")
    for tensor, name in parts.items():
        if not isinstance(name, str) or pathlib.Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"{origin}: {tensor} lies in {name!r}, which is no .safetensors file beside the index; {fix}"
            )
    return [tensor_file(origin.with_name(name)) for name in sorted(set(parts.values()))]


def tensor_file(path: Path) -> pathlib.Path:
    """Returns the file that `path` names: itself, or of a directory model.safetensors, or the index of several."""
    path = pathlib.Path(path)
    if path.is_dir():
        index = path / INDEX
        if index.is_file():
            return index
        path = path / TENSORS
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: only .safetensors files are read, because loading a pickle can run code; {_SAVE}")
    if not path.is_file():
        raise UserError(f"{path}: not found; give a .safetensors file or a directory with model.safetensors")
    return path
