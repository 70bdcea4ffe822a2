"""CIFAR-10 in the official binary or python layout, from a directory or the .tar.gz archive."""

import gzip
import io
import math
import pathlib
import pickle
import pickletools
import tarfile
from typing import Any, BinaryIO

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.readers.bounded import open_regular

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGES_PER_FILE = 10_000
PIXELS = 3 * 32 * 32  # stored channel by channel
RECORD = 1 + PIXELS  # the label comes first

BINARY = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
PYTHON = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
LAYOUTS = {"cifar-10-batches-bin": BINARY, "cifar-10-batches-py": PYTHON}
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")

ADMITTED = (
    "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype",
)  # fmt: skip
BYTES_DTYPES = ("u1", "|u1", b"u1", b"|u1", "uint8", b"uint8")
MOST_BYTES = 64 << 20  # of a file; the official ones have 31 MB
MOST_ARCHIVE_BYTES = 512 << 20  # unpacked; the official archives have 184 MB
MOST_MEMBERS = 100

ImagesAndLabels = tuple[np.ndarray, np.ndarray]  # uint8 [N, 32, 32, 3] and [N] of one file


def read_cifar10(data: DataConfig, split: str) -> Arrays:
    """Reads images uint8 [N, 32, 32, 3] and labels int32 [N] of one split; `data.dir` may be the archive itself."""
    if not data.dir:
        raise UserError(f"config.data.dir is empty: cifar10 needs the folder of its files; {_fix('data/cifar10')}")
    path = user_path(data.dir, "config.data.dir")
    if not path.exists():
        raise UserError(f"config.data.dir = {data.dir}: no such file or folder; {_fix(path)}")
    if path.is_file():
        return _read_archive(path, split)
    layouts = [(folder, names[split]) for folder in (path, *(path / n for n in LAYOUTS)) for names in LAYOUTS.values()]
    for folder, names in layouts:
        if all((folder / name).exists() for name in names):
            return _parse_all([_read(folder / name) for name in names], names, folder)
    for name in ARCHIVES:
        if (path / name).exists():
            return _read_archive(path / name, split)
    for folder, names in layouts:
        missing = [name for name in names if not (folder / name).exists()]
        if len(missing) < len(names):
            raise UserError(f"{folder / missing[0]}: missing; {_fix(path)}")
    wanted = " nor ".join((BINARY[split][0], PYTHON[split][0], *ARCHIVES))
    raise UserError(f"config.data.dir = {data.dir}: found neither {wanted}; {_fix(path)}")


def _read(file: pathlib.Path) -> bytes:
    with open_regular(file) as stream:
        return stream.read(MOST_BYTES + 1)  # one more than is accepted


def _read_archive(archive: pathlib.Path, split: str) -> Arrays:
    wanted = set(BINARY[split]) | set(PYTHON[split])
    with open_regular(archive) as stream:
        try:
            found = _members(_inflated(stream), wanted)
        except Exception as error:  # tarfile raises nearly anything on damaged archives
            size = archive.stat().st_size
            raise UserError(
                f"{archive}: not a complete .tar.gz archive of CIFAR-10 ({size:,} bytes on disk: {error}); "
                f"delete it, then {_fix(archive.parent)}"
            ) from error
    names = PYTHON[split] if set(PYTHON[split]) & set(found) else BINARY[split]
    for name in names:
        if name not in found:
            raise UserError(f"{archive}: holds no {name}; {_fix(archive.parent)}")
    return _parse_all([found[name] for name in names], names, archive)


def _inflated(stream: BinaryIO) -> bytes:
    """Returns the content of a .tar.gz or .tar file, in memory, so that nothing in it can claim more than it has."""
    packed = stream.read(2) == b"\x1f\x8b"
    stream.seek(0)
    data = (gzip.GzipFile(fileobj=stream) if packed else stream).read(MOST_ARCHIVE_BYTES + 1)
    if len(data) > MOST_ARCHIVE_BYTES:
        raise ValueError(f"holds more than {MOST_ARCHIVE_BYTES:,} bytes")
    return data


def _members(data: bytes, wanted: set[str]) -> dict[str, bytes]:
    """Returns the wanted regular files of a tar archive by name; links lead nowhere."""
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for count, member in enumerate(tar):
            if count > MOST_MEMBERS:
                raise ValueError(f"has more than {MOST_MEMBERS} members")
            name = pathlib.PurePosixPath(member.name).name
            content = tar.extractfile(member) if name in wanted and member.isreg() else None
            if content is not None:
                found[name] = content.read(MOST_BYTES + 1)
    return found


def _parse_all(contents: list[bytes], names: list[str], where: pathlib.Path) -> Arrays:
    parse = _parse_binary if names[0].endswith(".bin") else _parse_python
    parts = [parse(data, where / name) for data, name in zip(contents, names, strict=True)]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return {"image": images, "label": labels.astype(np.int32)}


def _parse_binary(data: bytes, file: pathlib.Path) -> ImagesAndLabels:
    expected = IMAGES_PER_FILE * RECORD
    if len(data) != expected:
        raise UserError(
            f"{file}: {len(data):,} bytes, expected {expected:,}; the file is truncated or of another set: "
            f"delete it, then {_fix(file.parent)}"
        )
    records = np.frombuffer(data, np.uint8).reshape(IMAGES_PER_FILE, RECORD)
    return _images(records[:, 1:]), _checked_labels(records[:, 0], file)


def _parse_python(data: bytes, file: pathlib.Path) -> ImagesAndLabels:
    try:
        pixels, listed = read_batch(data)
    except NotABatch as error:
        raise UserError(
            f"{file}: not a CIFAR-10 python batch ({error}); delete it, then {_fix(file.parent)}"
        ) from error
    labels = np.array(listed)
    if pixels.shape != (IMAGES_PER_FILE, PIXELS) or labels.shape != (IMAGES_PER_FILE,):
        raise UserError(
            f"{file}: data is {pixels.dtype} {pixels.shape} with {labels.size} labels, expected uint8 "
            f"{(IMAGES_PER_FILE, PIXELS)}; delete it, then {_fix(file.parent)}"
        )
    return _images(pixels), _checked_labels(labels, file)


class NotABatch(ValueError):
    """The bytes are no pickle of plain values and arrays of bytes."""


class _Stored:
    """Keeps what a pickle says of an array or of its type, so that numpy builds nothing from a file's claims."""

    def __init__(self, *arguments: Any):
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _BatchUnpickler(pickle.Unpickler):
    """Admits numpy's constructors of arrays and types and no other name."""

    def find_class(self, module: str, name: str) -> type[_Stored]:
        if f"{module}.{name}" not in ADMITTED:
            raise NotABatch(f"the pickle asks for {module}.{name}"[:120] + ", which is not allowed")
        return _Stored


def read_batch(data: bytes) -> tuple[np.ndarray, list[int]]:
    """Returns the array b"data" and the integers b"labels" of a pickled dict."""
    if len(data) > MOST_BYTES:
        raise NotABatch(f"{len(data):,} bytes, at most {MOST_BYTES:,} are read")
    try:
        # Unpickling reserves memory for the largest number of a memo entry.
        puts = (int(entry or 0) for opcode, entry, _ in pickletools.genops(data) if "PUT" in opcode.name)
        if max(puts, default=0) > len(data):
            raise NotABatch("damaged: a memo entry with a huge number")
        content = _BatchUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # unpickling raises nearly anything on damaged files
        raise NotABatch(str(error) if isinstance(error, NotABatch) else f"damaged: {error}") from error
    if not isinstance(content, dict) or b"data" not in content or b"labels" not in content:
        raise NotABatch("no dict with data and labels")
    labels = content[b"labels"]
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise NotABatch("labels are no list of integers")
    return _array(content[b"data"]), labels


def _array(stored: Any) -> np.ndarray:
    """Returns a stored array of bytes if its claims fit its content."""
    if not isinstance(stored, _Stored) or not isinstance(stored.state, tuple) or len(stored.state) != 5:
        raise NotABatch("data is no array")
    _, shape, dtype, fortran, content = stored.state
    name = dtype.arguments[0] if isinstance(dtype, _Stored) and dtype.arguments else None
    if not isinstance(name, str | bytes) or name not in BYTES_DTYPES or fortran or not isinstance(content, bytes):
        raise NotABatch("data is no array of bytes in C order")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 4:
        raise NotABatch("data has no shape")
    if math.prod(shape) != len(content):
        raise NotABatch(f"data has shape {shape} and {len(content):,} bytes")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _images(pixels: np.ndarray) -> np.ndarray:
    images = np.empty((len(pixels), 32 * 32, 3), np.uint8)
    for channel, plane in enumerate(pixels.reshape(-1, 3, 32 * 32).transpose(1, 0, 2)):
        images[:, :, channel] = plane
    return images.reshape(-1, 32, 32, 3)


def _checked_labels(labels: np.ndarray, file: pathlib.Path) -> np.ndarray:
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= len(CLASSES):
        raise UserError(f"{file}: labels outside 0..9; the file is damaged: delete it, then {_fix(file.parent)}")
    return labels


def _fix(directory: pathlib.Path | str) -> str:
    path = pathlib.Path(directory)
    while path.name in LAYOUTS or path.name in ARCHIVES:
        path = path.parent
    return f"run: jepa-jax prepare-data cifar10 --dir={path}"
