"""Tiny randomly initialised models as transformers 5.22 saves them, with inputs and outputs (io.npz, NCHW)."""

import pathlib

SEGFORMER = pathlib.Path(__file__).parents[1] / "golden" / "weights" / "hf_segformer"
