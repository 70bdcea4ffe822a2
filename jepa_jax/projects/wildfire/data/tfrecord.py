"""TFRecord files of tf.train.Example protocol buffers, read without TensorFlow.

A record is its length (uint64), the masked CRC-32C of the length, the data, and the masked CRC-32C of the data. Of an
Example only lists of floats are read.
"""

import functools
import pathlib
import struct
from collections.abc import Iterator

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.data.readers.bounded import open_regular

HEADER_BYTES, FOOTER_BYTES = 12, 4
LANES = 256  # parts of a record whose checksums are computed side by side
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


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
    found = {}
    for features in _submessages(example, 1):
        for entry in _submessages(features, 1):  # of a map from names to features
            name = b"".join(_submessages(entry, 1)).decode()
            for feature in _submessages(entry, 2):
                for floats in _submessages(feature, 2):
                    found[name] = np.frombuffer(b"".join(_submessages(floats, 1)), "<f4").astype(np.float32)
    return found


def _submessages(message: bytes, number: int) -> Iterator[bytes]:
    """Yields the bytes of each field `number` of a message."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        kind = tag & 7
        if kind == VARINT:
            end = _varint(message, place)[1]
        elif kind == BYTES:
            length, place = _varint(message, place)
            end = place + length
        elif kind in (FIXED32, FIXED64):
            end = place + (4 if kind == FIXED32 else 8)
        else:
            raise ValueError(f"wire type {kind} at byte {place}")
        if end > len(message):
            raise ValueError(f"the field at byte {place} is cut off")
        if tag >> 3 == number:
            yield message[place:end]
        place = end


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Returns the number that begins at `place`, seven bits per byte, and the place after it."""
    value, shift = 0, 0
    while place < len(message) and shift < 64:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
    raise ValueError("a number is cut off or too long")


def masked_crc(data: bytes) -> int:
    """Returns the CRC-32C of some bytes, rotated and offset as TFRecord stores it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C (Castagnoli) of some bytes.

    The bytes are cut into LANES parts of equal length, whose remainders are computed side by side and then joined:
    the remainder of a part followed by n bytes is a linear function of its own. Zeros in front change nothing.
    """
    length = -(-max(len(data), 1) // LANES)
    message = np.zeros(LANES * length, np.uint8)
    message[len(message) - len(data) :] = np.frombuffer(data, np.uint8)
    lanes = np.zeros(LANES, np.uint32)
    for column in message.reshape(LANES, length).T:
        lanes = _step(lanes ^ column)
    return _joined(lanes, length, len(data))


def _joined(lanes: np.ndarray, length: int, num_bytes: int) -> int:
    skip = _skip_tables(length)
    crc = 0
    for lane in lanes.tolist():
        crc = _skipped(skip, crc) ^ lane
    # The register begins as all ones, which is a term of its own: 2^32 - 1 carried over all bytes.
    return crc ^ _carried(num_bytes) ^ 0xFFFFFFFF


def _skipped(tables: list[list[int]], crc: int) -> int:
    a, b, c, d = tables
    return a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24]


@functools.lru_cache(maxsize=64)
def _carried(num_bytes: int) -> int:
    crc = 0xFFFFFFFF
    for bit in range(num_bytes.bit_length()):
        if num_bytes >> bit & 1:
            crc = _skipped(_skip_tables(1 << bit), crc)
    return crc


@functools.lru_cache(maxsize=64)
def _skip_tables(length: int) -> list[list[int]]:
    """Returns, for each of the four bytes of a remainder, what each of its values becomes after `length` zeros."""
    if length == 1:
        values = np.arange(256, dtype=np.uint32)
        return [_step(values << np.uint32(8 * i)).tolist() for i in range(4)]
    half = _skip_tables(length // 2)
    tables = [[_skipped(half, _skipped(half, value << 8 * i)) for value in range(256)] for i in range(4)]
    if length % 2:
        tables = [[_skipped(_skip_tables(1), value) for value in table] for table in tables]
    return tables


def _step(crc: np.ndarray) -> np.ndarray:
    """Returns remainders after eight more bits."""
    return crc >> np.uint32(8) ^ _byte_table()[crc & np.uint32(255)]


@functools.lru_cache(maxsize=1)
def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = table >> np.uint32(1) ^ np.where(table & 1, np.uint32(0x82F63B78), np.uint32(0))
    return table
