"""Tiles of Next Day Wildfire Spread: files and TFRecords of the same tile are the same element; unknown pixels."""

import json
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.sources import open_splits
from jepa_jax.projects.wildfire.data.ndws import AFTER, BEFORE, RANGES
from jepa_jax.projects.wildfire.data.tfrecord import crc32c, float_features, masked_crc, read_record, record_offsets


def tile(seed):
    rng = np.random.default_rng(seed)
    maps = {name: rng.uniform(low, high, (64, 64)).astype(np.float32) for name, (low, high) in RANGES.items()}
    return maps | {name: rng.integers(-1, 2, (64, 64)).astype(np.float32) for name in (BEFORE, AFTER)}


def write_npz_set(folder, tiles):
    order = [BEFORE, *reversed(RANGES)]
    (folder / "channels.json").write_text(json.dumps(order))
    for split in ("train", "val"):
        (folder / split).mkdir()
        for i, maps in enumerate(tiles):
            inputs = np.stack([maps[name] for name in order])
            np.savez(folder / split / f"{i}.npz", inputs=inputs, targets=maps[AFTER][None].astype(np.int64))


def varint(value):
    low, value = value & 127, value >> 7
    return bytes([low | 128]) + varint(value) if value else bytes([low])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(maps, packed=True):
    entries = b""
    for name, values in maps.items():
        numbers = np.asarray(values, "<f4")
        one_by_one = b"".join(varint(1 << 3 | 5) + n.tobytes() for n in numbers.ravel())
        floats = field(1, numbers.tobytes()) if packed else one_by_one
        entries += field(1, field(1, name.encode()) + field(2, field(2, floats)))
    return field(1, entries)


def record(data):
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def write_records(folder, tiles):
    for split in ("train", "test"):
        records = [record(example(maps)) for maps in tiles]
        for part, content in enumerate((records[:2], records[2:])):
            name = f"next_day_wildfire_spread_{split}_{part:02}.tfrecord"
            (folder / name).write_bytes(b"".join(content))


def opened(folder, **keys):
    keys = dict(source="ndws", dir=str(folder), image_size=64, channels=11, max_frames=2) | keys
    return open_splits(DataConfig(**keys))


def test_files_and_records_give_the_same_elements(tmp_path):
    tiles = [tile(seed) for seed in range(3)]
    for name, write in (("files", write_npz_set), ("records", write_records)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, tiles)
    (train, test), (recorded, _) = opened(tmp_path / "files"), opened(tmp_path / "records")
    batch, other = (source.batch(np.arange(3)) for source in (train, recorded))
    assert len(train) == len(test) == len(recorded) == 3
    for key in train.spec:
        np.testing.assert_array_equal(batch[key], other[key], err_msg=key)
        assert batch[key].shape[1:] == train.spec[key].shape and batch[key].dtype == train.spec[key].dtype
    for i, maps in enumerate(tiles):
        unknown = (maps[BEFORE] == -1) | (maps[AFTER] == -1)
        assert batch["valid"][i].tolist() == [False, True] and unknown.any()
        np.testing.assert_array_equal(batch["known"][i, ..., 0], ~unknown)
        np.testing.assert_array_equal(batch["fire"][i, 1, ..., 0], maps[BEFORE] == 1)
        np.testing.assert_array_equal(batch["target"][i, ..., 0], maps[AFTER] == 1)
        np.testing.assert_allclose(batch["static"][i, ..., 0], maps["elevation"] / 3141, atol=1e-6)
    again = pickle.loads(pickle.dumps(recorded)).batch(np.array([2]))
    np.testing.assert_array_equal(again["static"], other["static"][2:])


def test_the_mean_of_directions_is_taken_on_the_circle(tmp_path):
    maps = tile(0)
    maps["th"] = np.where(np.arange(64) % 2, 350, 30).astype(np.float32) * np.ones((64, 1), np.float32)
    maps["vs"][:] = RANGES["vs"][1] / 2
    write_npz_set(tmp_path, [maps])
    np.testing.assert_allclose(
        opened(tmp_path)[0].batch(np.array([0]))["wind"][0], [[0, 0], [0.5, 10 / 360]], atol=1e-6
    )


@settings(max_examples=30)
@given(st.binary(max_size=2000))
def test_crc32c_equals_the_bitwise_definition(data):
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    assert crc32c(data) == register ^ 0xFFFFFFFF


def test_crc32c_of_the_standard():
    """Values of RFC 3720, B.4, and the check value of the CRC catalogue."""
    assert [crc32c(d) for d in (b"123456789", bytes(32), b"\xff" * 32)] == [0xE3069283, 0x8A9136AA, 0x62A8AB43]


@settings(max_examples=15)
@given(st.dictionaries(st.text(max_size=8), st.lists(st.floats(width=32, allow_nan=False), max_size=5)), st.booleans())
def test_examples_are_read_packed_or_not(maps, packed):
    read = float_features(example(maps, packed))
    assert {name: values.tolist() for name, values in read.items()} == maps


def test_damaged_records_are_refused_with_the_file_named(tmp_path):
    whole, file = record(example(tile(0))), tmp_path / "a_train_0.tfrecord"
    file.write_bytes(whole + whole)
    assert record_offsets(file) == [0, len(whole)] and read_record(file, len(whole)) == whole[12:-4]
    file.write_bytes(whole + whole[:-1])
    with pytest.raises(UserError, match=f"a_train_0.tfrecord: ends within the record at byte {len(whole)}"):
        record_offsets(file)
    file.write_bytes(whole + b"\x01" + whole[1:])
    with pytest.raises(UserError, match=f"a_train_0.tfrecord: no TFRecord begins at byte {len(whole)}"):
        record_offsets(file)
    file.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    with pytest.raises(UserError, match="a_train_0.tfrecord: the record at byte 0 is damaged"):
        read_record(file, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({AFTER: np.full((64, 64), 2.0)}, "FireMask has values other than -1, 0 and 1"),
        ({"vs": np.full((64, 64), np.nan)}, "vs has values that are not numbers"),
        ({"th": np.zeros(7)}, "has no map th of 64 x 64"),
    ],
)
def test_bad_tiles_are_refused_with_the_file_named(tmp_path, change, message):
    write_records(tmp_path, [tile(0) | change])
    with pytest.raises(UserError, match=f"spread_train_00.tfrecord: {message}"):
        opened(tmp_path)[0].batch(np.array([0]))


def test_config_and_folder_must_fit(tmp_path):
    with pytest.raises(UserError, match="no tile of the train split"):
        opened(tmp_path)
    write_npz_set(tmp_path, [tile(0)])
    with pytest.raises(UserError, match="set data.channels = 11"):
        opened(tmp_path, channels=3)
    with pytest.raises(UserError, match="set data.image_size = 64"):
        opened(tmp_path, image_size=32)
    (tmp_path / "channels.json").write_text('["elevation"]')
    with pytest.raises(UserError, match="channels.json: lists elevation; expected"):
        opened(tmp_path)
