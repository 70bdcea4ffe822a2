"""Damaged and hostile files of fires: each is read or ends in one clear error."""

import itertools
import json
import os

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.sources import open_source
from jepa_jax.projects.wildfire.data.ndws import BEFORE, RANGES
from jepa_jax.projects.wildfire.data.tfrecord import float_features


def config(source, directory, **changes):
    return DataConfig(**{"source": source, "dir": str(directory), "image_size": 8, "batch_size": 4} | changes)


ODD = [
    np.array("text"), np.array(["a", "b"]), np.zeros(0), np.zeros((2, 2, 2, 2, 2)), np.array(1 + 2j),
    np.array(["2020-01-01"], "M8[D]"), np.full((3, 8, 8, 1), np.nan), np.array([2**63], np.uint64),
    np.zeros((3, 8, 8, 1), "S4"),
    np.zeros((3, 8, 8, 1), [("x", "f4")]), np.array(True), np.zeros((1, 8, 8, 3)), np.zeros((2, 3), "f2"),
]  # fmt: skip


def test_fire_sequences_of_any_content_are_read_or_refused(tmp_path):
    good = {
        "fire": np.zeros((3, 8, 8, 1)), "wind": np.zeros((3, 2)), "static": np.zeros((8, 8, 3)),
        "target": np.zeros((8, 8, 1)), "known": np.ones((8, 8, 1)), "valid": np.ones(3), "fire_id": np.array("x"),
    }  # fmt: skip
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / f"{name}.npz", **good | {"fire_id": np.array(name)})
    data = config("fire_sequences", tmp_path, channels=3)
    assert len(open_source(data, "train")) == 1
    for key, odd in itertools.product(good, ODD):
        np.savez(tmp_path / "train" / "train.npz", **good | {key: odd})
        try:
            open_source(data, "train").batch(np.arange(1))
        except UserError:
            pass
    np.savez(tmp_path / "train" / "train.npz", **good)
    os.rename(tmp_path / "train" / "train.npz", os.fsencode(tmp_path / "train") + b"/\xff.npz")
    assert len(open_source(data, "train")) == 1


def test_ndws_tiles_of_any_content_are_read_or_refused(tmp_path):
    order = [*RANGES, BEFORE]
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "0.npz", inputs=np.zeros((12, 64, 64)), targets=np.zeros((1, 64, 64)))
    (tmp_path / "channels.json").write_text(json.dumps(order))
    data = config("ndws", tmp_path, channels=11, image_size=64)
    open_source(data, "train").batch(np.arange(1))
    odds = [*ODD, np.zeros((12, 64, 64), "S4"), np.zeros((12, 64, 64), complex), np.zeros((12, 64, 64), "M8[D]")]
    for key, odd in itertools.product(("inputs", "targets"), [*odds, np.zeros((64, 64), "S4")]):
        good = {"inputs": np.zeros((12, 64, 64)), "targets": np.zeros((1, 64, 64))}
        np.savez(tmp_path / "train" / "0.npz", **good | {key: odd})
        try:
            open_source(data, "train").batch(np.arange(1))
        except UserError:
            pass
    for content in ("3", "{", "[[1], 2]", "[" * 100_000, '"text"', "null", "[null, 1]"):
        (tmp_path / "channels.json").write_text(content)
        with pytest.raises(UserError, match="channels.json: "):
            open_source(data, "train")


def test_a_number_without_end_in_a_record_is_refused_at_once():
    with pytest.raises(ValueError, match="corrupt"):
        float_features(b"\xff" * (4 << 20))


@pytest.mark.parametrize("source", ["fire_sequences", "ndws"])
def test_places_that_cannot_be_read_are_named(tmp_path, source):
    for directory in ("x" * 5000, "a\0b", str(tmp_path / "file" / "below"), "/proc/self/mem"):
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(UserError):
            open_source(config(source, directory, channels=11 if source == "ndws" else 3), "train")
