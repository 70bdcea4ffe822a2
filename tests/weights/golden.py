"""Tiny models with random weights as transformers 5.22 and timm 1.0.30 save them; io.npz: inputs, outputs (NCHW)."""

import pathlib

import numpy as np

WEIGHTS = pathlib.Path(__file__).parents[1] / "golden" / "weights"
SEGFORMER = WEIGHTS / "hf_segformer"


def recorded(name):
    """Returns inputs and outputs of a model; pixels and maps with channels last."""
    stored = dict(np.load(WEIGHTS / name / "io.npz"))
    return {key: value.transpose(0, 2, 3, 1) if value.ndim == 4 else value for key, value in stored.items()}
