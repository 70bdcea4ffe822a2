"""Data sets, their batches and augmentation.

    dataset = jepa_jax.data.dataset(config, "train")  # a grain.MapDataset: dataset[n] is what step n sees

The names below are the public ones; they are imported on first use.
"""

import importlib
import multiprocessing
from typing import Any

from jepa_jax.runtime.platforms import import_jax

if multiprocessing.current_process().name != "MainProcess":
    import_jax()  # a data worker imports this first, then what imports jax with remarks about GPUs

PUBLIC = {
    "as_source": "elements",
    "dataset": "sources",
    "batch_dataset": "batches",
    "SupervisedPool": "workers",
    "load_batches": "pipeline",
    "open_source": "sources",
    "augment_views": "augment",
}


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{PUBLIC[name]}"), name)
