"""Features on disk: what an encoder made of a data set is computed once and read by every later evaluation."""

import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jepa_jax.base.files import write_atomically
from jepa_jax.data.contract import Source
from jepa_jax.evals.features import Split

FINGERPRINTED_IMAGES = 64


class FeatureCache:
    """Splits by name in a folder, all of one encoder on one data set; those of any other are removed."""

    def __init__(self, folder: pathlib.Path, identity: Mapping[str, Any]):
        text = json.dumps(identity, sort_keys=True, default=str)
        self._folder, self._prefix = folder, hashlib.sha256(text.encode()).hexdigest()[:16]
        self.hits = 0
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.npz"):
            if not path.name.startswith(self._prefix):
                path.unlink(missing_ok=True)

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def get(self, name: str, compute: Callable[[], Split]) -> Split:
        """The split of this name, computed and written if it is not there or cannot be read."""
        path = self._path(name)
        try:
            with np.load(path) as stored:
                split = Split(stored["features"], stored["labels"])
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
            split = compute()
            buffer = io.BytesIO()
            np.savez(buffer, features=split.features, labels=split.labels)
            write_atomically(path, buffer.getvalue())
        else:
            self.hits += 1
        return split

    def _path(self, name: str) -> pathlib.Path:
        return self._folder / f"{self._prefix}_{name}.npz"


def fingerprint(source: Source) -> dict[str, Any]:
    """What tells one data set from another: its size, its shapes and its first elements."""
    batch = source.batch(np.arange(min(FINGERPRINTED_IMAGES, len(source))))
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(batch[key]).tobytes() for key in source.spec))
    shapes = {key: [str(one.dtype), *one.shape] for key, one in source.spec.items()}
    return {"images": len(source), "shapes": shapes, "sha256": digest.hexdigest()[:16]}
