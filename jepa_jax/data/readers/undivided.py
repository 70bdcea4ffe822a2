"""Train and test images of data that comes without splits: one in ten is a test image, the same one everywhere."""

import hashlib
import pathlib

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import fixed_order

TEST_SHARE = 10  # one in so many


def drawn_part(count: int, split: str, place: pathlib.Path) -> np.ndarray:
    """Returns which of `count` images form a split, in ascending order; `place` is what an error names."""
    if count < 2:
        raise UserError(f"{place}: one image cannot be divided into a train and a test split; add images")
    order = fixed_order(count)
    test = max(1, count // TEST_SHARE)
    return np.sort(order[:test] if split == "test" else order[test:])


def name_digest(name: bytes) -> bytes:
    """Returns the hash of a name by which `is_test_name` divides and folders are ordered."""
    return hashlib.sha1(name).digest()


def is_test_name(digest: bytes) -> bool:
    """Returns whether the image or sequence of this name is in the test split, whatever else is added or removed."""
    return digest[-1] % TEST_SHARE == 0
