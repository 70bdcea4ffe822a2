"""TFRecord files of tf.train.Example protocol buffers, read without TensorFlow.

A record is its length (uint64), the masked CRC-32C of the length, the data, and the masked CRC-32C of the data. Of an
Example only lists of floats are read.
"""

import functools
import pathlib
import struct

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.data.readers.bounded import open_regular

HEADER_BYTES, FOOTER_BYTES = 12, 4
SETS_ALL_BITS = b"\x54\x64\x1f\x64"  # bytes after which the remainder is all ones, with which a CRC-32C begins


def record_offsets(file: pathlib.Path) -> list[int]:
    """Returns where the records of a file begin; raises UserError if the file is cut off or damaged."""
    size, offset, offsets = file.stat().st_size, 0, []
    with open_regular(file) as stream:
        while offset < size:
            offsets.append(offset)
            stream.seek(offset)
            offset += HEADER_BYTES + _data_length(stream.read(HEADER_BYTES), file, offset) + FOOTER_BYTES
    if offset > size:
        raise UserError(f"{file}: ends within the record at byte {offsets[-1]}; copy or download the file again")
    return offsets


def read_record(file: pathlib.Path, offset: int) -> bytes:
    """Returns the data of the record that begins at `offset`, with its checksum verified."""
    with open_regular(file) as stream:
        stream.seek(offset)
        length = _data_length(stream.read(HEADER_BYTES), file, offset)
        data, footer = stream.read(length), stream.read(FOOTER_BYTES)
    if len(footer) < FOOTER_BYTES or struct.unpack("<I", footer)[0] != masked_crc(data):
        raise UserError(f"{file}: the record at byte {offset} is damaged; copy or download the file again")
    return data


def _data_length(header: bytes, file: pathlib.Path, offset: int) -> int:
    if len(header) < HEADER_BYTES or struct.unpack("<I", header[8:])[0] != masked_crc(header[:8]):
        raise UserError(f"{file}: no TFRecord begins at byte {offset}; copy or download the file again")
    return int(struct.unpack("<Q", header[:8])[0])


def float_features(example: bytes) -> dict[str, np.ndarray]:
    """Returns the float lists of a tf.train.Example by name, float32 each.

    Raises:
      ValueError: the bytes are not an Example.
    """
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto.tf_example_generated_pb2 import Example

    try:
        features = Example.FromString(example).features.feature
    except DecodeError as error:
        raise ValueError(error) from None
    return {
        name: np.array(feature.float_list.value, np.float32)
        for name, feature in features.items()
        if feature.HasField("float_list")
    }


def masked_crc(data: bytes) -> int:
    """Returns the CRC-32C of some bytes, rotated and offset as TFRecord stores it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C (Castagnoli) of some bytes.

    Remainders of neighbouring parts are joined, pair by pair, until one is left: that of a part followed by n bytes is
    a linear function of its own, which tables of four times 256 values describe. Zeros in front change nothing.
    """
    message = np.frombuffer(SETS_ALL_BITS + data, np.uint8)
    size = 1 << (len(message) - 1).bit_length()
    after_one = _after_one_byte()
    remainders, skip = after_one[0][np.pad(message, (size - len(message), 0))], after_one
    while len(remainders) > 1:
        remainders = _skipped(skip, remainders[::2]) ^ remainders[1::2]
        skip = _skipped(skip, skip)
    return int(remainders[0]) ^ 0xFFFFFFFF


def _skipped(tables: np.ndarray, remainders: np.ndarray) -> np.ndarray:
    """Returns what remainders become after the zeros that the tables [4, 256] stand for."""
    parts = [tables[i][remainders >> np.uint32(8 * i) & np.uint32(255)] for i in range(4)]
    return parts[0] ^ parts[1] ^ parts[2] ^ parts[3]


@functools.cache
def _after_one_byte() -> np.ndarray:
    """Returns, for each of the four bytes of a remainder, what each of its values becomes after a zero byte."""
    table = np.arange(256, dtype=np.uint32)
    lowest = table
    for _ in range(8):
        lowest = lowest >> np.uint32(1) ^ np.where(lowest & 1, np.uint32(0x82F63B78), np.uint32(0))
    return np.stack([lowest, *(table << np.uint32(8 * i) for i in range(3))])
