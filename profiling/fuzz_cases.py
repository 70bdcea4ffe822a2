"""What `fuzz.py` damages: files of every format that data and weights are read from; see also `fuzz_json.py`.

Reading a damaged file may work or raise UserError; anything else is a problem, as is more than SECONDS of CPU time.
"""

import contextlib
import dataclasses
import gzip
import io
import json
import math
import os
import pathlib
import pickle
import random
import shutil
import signal
import struct
import tarfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.readers import cifar
from jepa_jax.data.readers.shards import write_shards
from jepa_jax.data.sources import open_source
from tests.data.tfds_pictures import prepare as prepare_tfds

SECONDS = 10.0  # of CPU time for one file
MEMORY_RAN_OUT = ("MemoryError", "does not fit into memory")  # in messages of errors that are otherwise clear
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3.5, 2**31, 2**63, 1e308, math.nan, math.inf, "", "x", "x" * 1000, "\udcff", "$\\frac{",
    "../..", [], {}, [[]], [None], {"a": None}, [1, 2, 3],
)  # fmt: skip
IMAGES = 12
SIZE = 16
GOLDEN = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "weights"
WEIGHTS = ("hf_vit", "hf_dinov2", "timm_resnet_basic")


class Hang(BaseException):
    """A file took more than SECONDS; no handler of exceptions keeps it."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Files of one kind.

    Attributes:
      write: makes whole ones in an empty folder.
      read: reads them.
      damaged: pattern of those to damage.
    """

    write: Callable[[pathlib.Path], None]
    read: Callable[[pathlib.Path], None]
    damaged: str = "*"

    def files(self, folder: pathlib.Path) -> list[pathlib.Path]:
        return sorted(path for path in folder.rglob(self.damaged) if path.is_file())


def pictures() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (IMAGES, SIZE, SIZE, 3), np.uint8)


def encoded(image: np.ndarray, format: str) -> bytes:
    buffer = io.BytesIO()
    if format == "npy":
        np.save(buffer, image)
    elif format == "bands":
        import tifffile

        tifffile.imwrite(buffer, np.repeat(np.moveaxis(image, -1, 0), 2, axis=0)[:5], photometric="minisblack")
    else:
        Image.fromarray(image).save(buffer, format=format)
    return buffer.getvalue()


def reads(source: str, place: str = "", **settings: Any) -> Callable[[pathlib.Path], None]:
    """Returns a function that opens both splits of a folder and reads some elements."""

    def read(folder: pathlib.Path) -> None:
        data = DataConfig(source=source, dir=str(folder / place), image_size=SIZE, **settings)
        for split in ("train", "test"):
            opened = open_source(data, split)
            opened.batch(np.arange(min(4, len(opened))))

    return read


def folder_of(format: str, ending: str, **settings: Any) -> Target:
    def write(folder: pathlib.Path) -> None:
        for number, image in enumerate(pictures()):
            file = folder / ("train" if number < 8 else "test") / "ab"[number % 2] / f"{number}.{ending}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(image, format))

    return Target(write, reads("folder", **settings))


def write_npz(folder: pathlib.Path) -> None:
    for split in ("train", "test"):
        np.savez(folder / f"{split}.npz", image=pictures(), label=np.arange(IMAGES) % 3)


def write_idx(folder: pathlib.Path) -> None:
    for prefix in ("train", "t10k"):
        images = bytes([0, 0, 8, 3]) + struct.pack(">III", IMAGES, SIZE, SIZE) + pictures()[..., 0].tobytes()
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        labels = bytes([0, 0, 8, 1]) + struct.pack(">I", IMAGES) + bytes(range(IMAGES))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(labels)


def write_cifar_pickles(folder: pathlib.Path) -> None:
    for name in (name for names in cifar.PYTHON.values() for name in names):
        pixels = np.zeros((4, cifar.PIXELS), np.uint8)
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": [0, 1, 2, 9]}, protocol=3))


def add_to(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def write_cifar_archive(folder: pathlib.Path) -> None:
    with tarfile.open(folder / cifar.ARCHIVES[0], "w:gz") as tar:
        for name in (name for names in cifar.BINARY.values() for name in names):
            add_to(tar, f"cifar-10-batches-bin/{name}", bytes(4 * cifar.RECORD))


def reads_cifar(folder: pathlib.Path) -> None:
    with mock.patch.object(cifar, "IMAGES_PER_FILE", 4):
        for split in ("train", "test"):
            open_source(DataConfig(source="cifar10", dir=str(folder), image_size=32), split)


def write_tars(folder: pathlib.Path) -> None:
    for split in ("train", "test"):
        with tarfile.open(folder / f"{split}-0.tar", "w") as tar:
            for number, image in enumerate(pictures()):
                add_to(tar, f"{number:03}.png", encoded(image, "png"))
                add_to(tar, f"{number:03}.cls", str(number % 3).encode())


def write_parquet(folder: pathlib.Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table(
        {
            "image": [{"bytes": encoded(image, "png"), "path": None} for image in pictures()],
            "label": [number % 3 for number in range(IMAGES)],
        }
    )
    described = {"info": {"features": {"label": {"names": ["a", "b", "c"]}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(described)})
    for split in ("train", "test"):
        parquet.write_table(table, folder / f"{split}-0.parquet", row_group_size=5)


def write_shard_folder(folder: pathlib.Path) -> None:
    photos = folder / "photos"
    folder_of("png", "png").write(photos)
    data = DataConfig(source="folder", dir=str(photos), image_size=SIZE)
    sources: Any = {split: open_source(data, split) for split in ("train", "test")}
    write_shards(sources, folder / "shards")
    shutil.rmtree(photos)


def write_tfds(folder: pathlib.Path) -> None:
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():  # a set that TFDS knows by name is not read from its files alone
        prepare_tfds(folder, {"train": pictures()[:8], "test": pictures()[8:]})


def weights(name: str) -> Target:
    """Returns a public model's weights, whose config.json is damaged."""
    from jepa_jax.weights.load import load_model

    def write(folder: pathlib.Path) -> None:
        shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)

    return Target(write, lambda folder: void(load_model(str(folder))), "*.json")


def readers() -> dict[str, Target]:
    """Returns files of every format that data and weights are read from, by name."""
    channels = {"npy": 3, "bands": 5}
    formats = {"png": "png", "jpeg": "jpg", "tiff": "tif", "gif": "gif", "webp": "webp", "bmp": "bmp", "npy": "npy"}
    folders = {f"folder of {format}": folder_of(format, ending) for format, ending in formats.items()}
    return folders | {
        "folder of bands": folder_of("bands", "tif", channels=channels["bands"]),
        "npz": Target(write_npz, reads("npz")),
        "idx": Target(write_idx, reads("idx", channels=1)),
        "cifar10 pickles": Target(write_cifar_pickles, reads_cifar),
        "cifar10 archive": Target(write_cifar_archive, reads_cifar),
        "webdataset": Target(write_tars, reads("webdataset", num_train=8)),
        "parquet": Target(write_parquet, reads("parquet")),
        "shards": Target(write_shard_folder, reads("shards", "shards"), "*.array_record"),
        "manifest.json": Target(write_shard_folder, reads("shards", "shards"), "manifest.json"),
        "tfds": Target(write_tfds, reads("tfds:tiny_pictures")),
        **{f"weights {name}": weights(name) for name in WEIGHTS},
        "safetensors": dataclasses.replace(weights(WEIGHTS[0]), damaged="*.safetensors"),
    }


def void(value: object) -> None:
    """Drops a value."""


def damaged(content: bytes, rng: random.Random, *, is_json: bool) -> bytes:
    """Returns a file with one to three changes; those of JSON mostly keep it JSON."""
    if is_json and rng.random() < 0.8:
        try:
            return changed_json(content, rng)
        except (ValueError, RecursionError):
            pass  # lines of JSON
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(data) + 1)
        rng.choice((flip, put_number, cut, repeat, end_here, put_text))(data, place, rng)
    return bytes(data)


def flip(data: bytearray, place: int, rng: random.Random) -> None:
    if place < len(data):
        data[place] ^= 1 << rng.randrange(8)


def put_number(data: bytearray, place: int, rng: random.Random) -> None:
    size, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
    data[place : place + size] = (rng.choice(NUMBERS) % 256**size).to_bytes(size, order)


def cut(data: bytearray, place: int, rng: random.Random) -> None:
    del data[place : place + rng.choice((1, 4, 64, 1000))]


def repeat(data: bytearray, place: int, rng: random.Random) -> None:
    data[place:place] = data[place : place + rng.choice((1, 16, 1000))] * rng.choice((1, 2, 50))


def end_here(data: bytearray, place: int, rng: random.Random) -> None:
    del data[place:]


def put_text(data: bytearray, place: int, rng: random.Random) -> None:
    data[place:place] = rng.choice((b"\0" * 8, b"\xff" * 8, b"999999999999", b"-1", b"\n", b'"', b"{" * 5000))


def changed_json(content: bytes, rng: random.Random) -> bytes:
    """Returns a JSON document in which some values have become others, or are missing or renamed."""
    document = [json.loads(content)]
    for _ in range(rng.randint(1, 3)):
        parent, key = rng.choice(list(places(document)))
        how = rng.random()
        if how < 0.7 or isinstance(parent, list):
            parent[key] = rng.choice(VALUES)
        elif how < 0.9:
            del parent[key]
        else:
            parent[f"{key}x"] = parent.pop(key)
    return json.dumps(document[0]).encode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the parent and the key of every value in a document."""
    for key in range(len(value)) if isinstance(value, list) else list(value):
        yield value, key
        if isinstance(value[key], list | dict):
            yield from places(value[key])


def check(target: Target, folder: pathlib.Path, seed: int) -> str:
    """Damages a file, reads it and puts it back; returns what was wrong, or ""."""
    rng, kept = random.Random(seed), {file: file.read_bytes() for file in target.files(folder)}
    file = rng.choice(sorted(kept))
    file.write_bytes(damaged(kept[file], rng, is_json=file.suffix.startswith(".json")))
    try:
        with limited_time():
            target.read(folder)
    except UserError as error:
        return f"{file.name}: {error}" if any(words in str(error) for words in MEMORY_RAN_OUT) else ""
    except (Exception, Hang) as error:
        place = error.__traceback__
        while place and place.tb_next:
            place = place.tb_next
        where = f"{pathlib.Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}" if place else ""
        return f"{file.name}: {type(error).__name__}: {str(error)[:200]} ({where})"
    finally:
        for path, content in kept.items():
            if path.read_bytes() != content:
                path.write_bytes(content)
    return ""


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Raises Hang after SECONDS of CPU time of this process."""

    def stop(*_: object) -> None:
        raise Hang(f"takes more than {SECONDS:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def check_all(target: Target, folder: pathlib.Path, seeds: Sequence[int]) -> dict[int, str]:
    """Writes the files of a target, which must be readable, and damages them; returns what was wrong by seed."""
    os.makedirs(folder, exist_ok=True)
    target.write(folder)
    target.read(folder)
    return {seed: found for seed in seeds if (found := check(target, folder, seed))}
