"""A source: one array per split, D/train.npy and D/test.npy, uint8 [N, H, W, C], read by random access.

    export PYTHONPATH=docs/examples
    jepa-jax train --config=quickstart --config.data.source=stored_maps:StoredMaps --config.data.dir=data/maps \
        --workdir=runs/maps

The files are mapped into memory and opened on first use: a source is pickled into worker processes, and its data are
not. Without labels there is no probe.
"""

import functools
import pathlib

import jax
import numpy as np

from jepa_jax.base.errors import UserError


class StoredMaps:
    """One split; `spec` says what an element is, `classes` what its labels count."""

    classes = ()

    def __init__(self, data, split):
        self._file = pathlib.Path(data.dir) / f"{split}.npy"
        if not self._file.exists():
            raise UserError(f"config.data.dir = {data.dir!r}: holds no {split}.npy")
        self.spec = {"image": jax.ShapeDtypeStruct(self._maps.shape[1:], np.uint8)}

    @functools.cached_property
    def _maps(self):
        return np.load(self._file, mmap_mode="r")

    def __len__(self):
        return len(self._maps)

    def batch(self, indices):
        return {"image": np.asarray(self._maps[indices])}

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "_maps"}
