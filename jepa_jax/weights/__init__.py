"""Weights in and out: public checkpoints of transformers, timm and torchvision, and encoders of our own.

    model = jepa_jax.weights.load_model("weights/ijepa")
    tokens = model.apply(pixel_values)  # [B, T, D] of normalised float32 images [B, H, W, C]

Importing this is cheap; jax is imported when a model is loaded.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jepa_jax.weights.load import LoadedModel

__all__ = ["load_model"]


def load_model(source: str | os.PathLike[str]) -> "LoadedModel":
    """Returns a model with the weights of a directory, a .safetensors file or the Hugging Face Hub (`hub:OWNER/NAME`).

    A directory holds model.safetensors and config.json as transformers, timm or `jepa-jax export` writes them; a file
    may have config.json beside it. Raises UserError with the name of every tensor that is missing or does not fit.
    """
    from jepa_jax.runtime.platforms import import_jax

    import_jax()
    from jepa_jax.weights.load import load_model

    return load_model(source)
