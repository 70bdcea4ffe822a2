"""Tiny models with random weights as transformers and timm 1.0.30 save them; io.npz: inputs, outputs (NCHW).

`write_transformers.py` has written those of DINOv2 with registers and SwiGLU, those of DINOv3, and io_resized.npz.
"""

import json
import pathlib
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file

WEIGHTS = pathlib.Path(__file__).parents[1] / "golden" / "weights"
SEGFORMER = WEIGHTS / "hf_segformer"


def recorded(name, file="io.npz"):
    """Returns inputs and outputs of a model; pixels and maps with channels last."""
    stored = dict(np.load(WEIGHTS / name / file))
    return {key: value.transpose(0, 2, 3, 1) if value.ndim == 4 else value for key, value in stored.items()}


def write_in_parts(folder, name):
    """Writes a model with its tensors in a.safetensors and b.safetensors, and an index of them."""
    tensors = load_file(WEIGHTS / name / "model.safetensors")
    shutil.copy(WEIGHTS / name / "config.json", folder)
    names = sorted(tensors)
    parts = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
