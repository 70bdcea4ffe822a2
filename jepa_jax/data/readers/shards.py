"""Photographs in ArrayRecord shards: files of many images with random access, for sets of millions of images.

`write_shards` makes them of another source: D/train-*.array_record, D/test-*.array_record, and D/manifest.json, which
lists every shard with its number of images, size, SHA-256 and labels, and the classes. A record is the image file as it
was, or resized; the number in the name of a shard is that of its first image.
"""

import io
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from array_record.python import array_record_module
from PIL import Image

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import file_digest, user_path, write_atomically
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import sample
from jepa_jax.data.in_memory import num_used
from jepa_jax.data.photos.decode import Photo
from jepa_jax.data.photos.source import PackedPhotos, PhotoSource
from jepa_jax.data.readers.bounded import open_regular

MANIFEST = "manifest.json"
FORMAT = "jepa_jax shards 1"
JPEG_QUALITY = 95  # of photographs that are resized
SHARD_BYTES = 2**28  # after which a new shard begins
MANIFEST_LIMIT = 2**31
ENTRY = {"file": str, "images": int, "bytes": int, "sha256": str, "labels": list}  # of a shard in the manifest


class ShardSource(PackedPhotos):
    fix = "write the shards again, or set data.on_error = skip"

    def __init__(self, data: DataConfig, split: str):
        self._root = user_path(data.dir, "config.data.dir")
        manifest = read_manifest(self._root, data.dir)
        shards = manifest["splits"][split]
        self._files = [str(check_shard(self._root, shard)) for shard in shards]
        self._ends = np.cumsum([shard["images"] for shard in shards])
        available = int(self._ends[-1]) if len(shards) else 0
        if not available:
            raise UserError(f"{self._root / MANIFEST}: lists no image of the {split} split; write the shards again")
        self._chosen = sample(available, num_used(data, split, available))
        self.classes = tuple(manifest["classes"])
        super().__init__(data, labelled=bool(self.classes))
        if self.classes:
            self.labels = np.concatenate([shard["labels"] for shard in shards]).astype(np.int32)[self._chosen]

    def name_of(self, index: int) -> str:
        shard, place = self._place(index)
        return f"{self._files[shard]}, record {place}"

    def content(self, index: int) -> bytes:
        shard, place = self._place(index)
        with self._lock:  # readers hold a position
            if shard not in self._open:
                self._open[shard] = array_record_module.ArrayRecordReader(self._files[shard])
            return self._open[shard].read([place])[0]


def read_manifest(root: pathlib.Path, directory: str) -> dict[str, Any]:
    if not directory or not (root / MANIFEST).is_file():
        raise UserError(
            f"config.data.dir = {directory!r}: no {MANIFEST} there; make shards of a folder of images with "
            "jepa-jax prepare-data shards FOLDER --dir=DIR"
        )
    try:
        with open_regular(root / MANIFEST) as file:
            manifest = json.loads(file.read(MANIFEST_LIMIT))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']!r}, expected {FORMAT!r}")
        if not isinstance(manifest["classes"], list) or not all(isinstance(name, str) for name in manifest["classes"]):
            raise ValueError("classes are no list of names")
        for shard in (shard for split in ("train", "test") for shard in manifest["splits"][split]):
            check_entry(shard, len(manifest["classes"]))
    except UserError:
        raise
    except Exception as error:  # any kind of damage
        raise UserError(
            f"{root / MANIFEST}: damaged ({type(error).__name__}: {error}); write the shards again"
        ) from error
    return manifest


def check_entry(shard: dict[str, Any], classes: int) -> None:
    """Raises ValueError, or whatever else, unless this is the description of a shard."""
    if any(type(shard[name]) is not kind for name, kind in ENTRY.items()):
        raise ValueError(f"{shard['file']}: one of {', '.join(ENTRY)} is of another kind")
    if not 0 < shard["images"] <= shard["bytes"]:
        raise ValueError(f"{shard['file']}: {shard['images']} images in {shard['bytes']} bytes")
    labels = shard["labels"]
    fit = len(labels) == shard["images"] and all(type(n) is int and 0 <= n < classes for n in labels)
    if classes and not fit:
        raise ValueError(f"labels of {shard['file']} do not fit its images")


def check_shard(root: pathlib.Path, shard: dict[str, Any]) -> pathlib.Path:
    file = root / pathlib.PurePath(shard["file"]).name
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
    if size != shard["bytes"]:
        raise UserError(f"{file}: {size:,} bytes, {MANIFEST} says {shard['bytes']:,}; copy or write the shards again")
    return file


def verify_shards(root: pathlib.Path) -> int:
    """Compares all shards with their checksums; returns how many there are. Raises UserError for one that differs."""
    manifest, count = read_manifest(root, str(root)), 0
    for shard in (shard for shards in manifest["splits"].values() for shard in shards):
        file = check_shard(root, shard)
        if file_digest(file, "sha256") != shard["sha256"]:
            raise UserError(f"{file}: its SHA-256 is not that of {MANIFEST}; copy or write the shards again")
        count += 1
    return count


def write_shards(
    sources: Mapping[str, PhotoSource],
    output: pathlib.Path,
    *,
    shorter_side: int = 0,
    shard_bytes: int = SHARD_BYTES,
    on_image: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Writes the images of the train and test split into shards; returns the manifest, written last."""
    if (output / MANIFEST).exists():
        raise UserError(f"{output / MANIFEST}: exists; remove the folder, or write to another one")
    output.mkdir(parents=True, exist_ok=True)
    total, done = sum(map(len, sources.values())), 0
    splits: dict[str, list[dict[str, Any]]] = {}
    for split, source in sources.items():
        splits[split] = []
        for shard in _write_split(source, output, split, shorter_side, shard_bytes):
            splits[split].append(shard)
            done += shard["images"]
            on_image(done, total)
    manifest = {"format": FORMAT, "classes": list(sources["train"].classes), "splits": splits}
    write_atomically(output / MANIFEST, json.dumps(manifest).encode())
    return manifest


def _write_split(
    source: PhotoSource, output: pathlib.Path, split: str, shorter_side: int, shard_bytes: int
) -> Iterator[dict[str, Any]]:
    """Yields the entry of the manifest of each shard of a split when it is written."""
    begin = 0
    while begin < len(source):
        file = output / f"{split}-{begin:09}.array_record"
        writer = array_record_module.ArrayRecordWriter(str(file), "group_size:1,uncompressed")
        written, end = 0, begin
        while end < len(source) and written < shard_bytes:
            content = source.content(end)
            if shorter_side:
                content = _smaller(content, source.spec["image"].shape[-1], shorter_side)
            writer.write(content)
            written += len(content)
            end += 1
        writer.close()
        labels = [] if source.labels is None else source.labels[begin:end].tolist()
        size, digest = file.stat().st_size, file_digest(file, "sha256")
        yield {"file": file.name, "images": end - begin, "bytes": size, "sha256": digest, "labels": labels}
        begin = end


def _smaller(content: bytes, channels: int, shorter_side: int) -> bytes:
    """Returns the file of an image with its shorter side resized, as JPEG.

    One that is small enough, has not three channels or cannot be decoded (`data.on_error` decides about it) stays.
    """
    try:
        photo = Photo(content, channels)
        if min(photo.size) <= shorter_side or channels != 3:
            return content
        image = Image.fromarray(photo.pixels())
    except Exception:  # image libraries raise nearly anything on damaged files
        return content
    scale = shorter_side / min(image.size)
    width, height = (max(shorter_side, round(scale * side)) for side in image.size)
    encoded = io.BytesIO()
    image.resize((width, height), Image.Resampling.LANCZOS).save(encoded, "JPEG", quality=JPEG_QUALITY)
    return encoded.getvalue()
