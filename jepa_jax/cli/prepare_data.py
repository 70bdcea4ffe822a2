"""Prepares data: downloads CIFAR-10, packs photographs into shards, or computes the statistics of a set.

  jepa-jax prepare-data cifar10 --dir=data/cifar10
  jepa-jax prepare-data shards PHOTOS --dir=data/shards [--shorter_side=256]
  jepa-jax prepare-data statistics PHOTOS [--source=folder] [--image_size=224] [--channels=3]

cifar10 uses what --dir holds already, in any of the official layouts; an interrupted download continues where it
stopped. shards takes a folder of images, or of parquet files, and writes ArrayRecord files with a manifest of their
checksums. statistics keeps mean and standard deviation of each channel beside the data, where data.statistics=set finds
them. Exit codes: 0 ready, 2 not possible (the message says what to do), 130 interrupted.
"""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jepa_jax.base.console import Console, ProgressBar
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser
from jepa_jax.data.download import Progress, RemoteFile, download

if TYPE_CHECKING:
    from jepa_jax.config.groups import DataConfig

REMOTE_ARCHIVES = {
    "cifar10": RemoteFile(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        size=170_052_171,
        md5="c32a1d4ab5d03f1284b67883e8d87530",
    ),
}
IMAGE_SIZE = {"cifar10": 32}
PREPARED_SPLITS = ("train", "test")


def add_flags(parser: Parser) -> None:
    parser.add_words("name", "what to prepare", choices=[*sorted(REMOTE_ARCHIVES), "shards", "statistics"])
    parser.add_words("input", "the data, for shards and statistics: what data.dir would be", least=0)
    parser.add_flag("dir", "DIR", "folder to write to, for cifar10 and shards; created if missing")
    parser.add_flag("source", "NAME", "data.source of the input; by default folder, or parquet where such files are")
    parser.add_flag("shorter_side", "N", "for shards: what larger images are resized to; 0 = keep files", 0, least=0)
    parser.add_flag("image_size", "N", "for statistics: pixels per side that images are delivered at", 224, least=4)
    parser.add_flag("channels", "N", "for statistics: channels of an image", 3, least=1)
    parser.add_flag("images", "N", "for statistics: how many images to read; 0 = all", 1000, least=0)


def prepare_data(arguments: Arguments, console: Console) -> Result:
    if arguments.name in REMOTE_ARCHIVES:
        return prepare_archive(arguments.name, user_path(required(arguments, "dir"), "--dir"))
    prepare = {"shards": prepare_shards, "statistics": prepare_statistics}[arguments.name]
    with progress_bar(arguments.name, "images") as on_progress:
        return prepare(arguments, on_progress)


def required(arguments: Arguments, name: str) -> str:
    """Returns a flag or argument that this kind of preparation needs."""
    if not (value := getattr(arguments, name)):
        shown = "--dir" if name == "dir" else "the folder of the data"
        raise UserError(f"missing: {shown}; see jepa-jax prepare-data --help")
    return value


def prepare_archive(name: str, directory: pathlib.Path) -> Result:
    """Downloads a data set unless it is there, and verifies it."""
    remote = REMOTE_ARCHIVES[name]
    found, counts = f"{directory}: found", {}
    if not (directory / remote.name).exists():  # an archive is compared with its checksum
        with contextlib.suppress(UserError):
            counts = count_images(name, directory)
    if not counts:
        with progress_bar(remote.name, "bytes") as on_progress:
            found = f"{download(remote, directory, on_progress)}: checksum verified,"
        counts = count_images(name, directory)
    text = (
        f"{found} {counts['train']:,} train and {counts['test']:,} test images. Use it with\n"
        f"  --config.data.source={name} --config.data.dir={directory}"
    )
    return Result([{"source": name, "dir": str(directory), **counts}], text)


def prepare_shards(arguments: Arguments, on_progress: Progress) -> Result:
    """Packs the images of a source into shards and compares them with their checksums."""
    from jepa_jax.data.photos.source import PhotoSource
    from jepa_jax.data.readers.shards import verify_shards, write_shards
    from jepa_jax.data.sources import open_source

    output, data = user_path(required(arguments, "dir"), "--dir"), input_data(arguments)
    sources = {}
    for split in PREPARED_SPLITS:
        source = open_source(data, split)
        if not isinstance(source, PhotoSource):
            raise UserError(f"--source={data.source}: holds arrays, not image files; use folder, parquet or tfds")
        sources[split] = source
    manifest = write_shards(sources, output, shorter_side=arguments.shorter_side, on_image=on_progress)
    shards = verify_shards(output)
    counts = {split: sum(shard["images"] for shard in manifest["splits"][split]) for split in PREPARED_SPLITS}
    text = (
        f"{output}: {counts['train']:,} train and {counts['test']:,} test images in {shards} shards, verified. "
        f"Use them with\n  --config.data.source=shards --config.data.dir={output}"
    )
    return Result([{"source": "shards", "dir": str(output), "shards": shards, **counts}], text)


def prepare_statistics(arguments: Arguments, on_progress: Progress) -> Result:
    """Computes mean and standard deviation of each channel of the train split and keeps them beside the data."""
    import dataclasses

    from jepa_jax.data.statistics import channel_statistics, keep_statistics, open_set, set_identity, statistics_file

    data = input_data(arguments)
    source, file = open_set(data), statistics_file(data)
    found = channel_statistics(source, arguments.images, on_progress)
    keep_statistics(file, found, set_identity(data, source))
    mean, std = (",".join(f"{number:g}" for number in numbers) for numbers in (found.mean, found.std))
    text = (
        f"{file}: of {found.images:,} images, used with --config.data.statistics=set. As flags:\n"
        f"  --config.data.augment.mean={mean} --config.data.augment.std={std}"
    )
    return Result([{"file": str(file), **dataclasses.asdict(found)}], text)


def input_data(arguments: Arguments) -> "DataConfig":
    """Returns the settings by which the input is read."""
    from jepa_jax.config.groups import DataConfig

    directory = required(arguments, "input")
    place = user_path(directory, "the folder of the data")
    has_parquet = any(folder.is_dir() and any(folder.glob("*.parquet")) for folder in (place, place / "data"))
    source = arguments.source or ("parquet" if has_parquet else "folder")
    return DataConfig(source=source, dir=directory, image_size=arguments.image_size, channels=arguments.channels)


@contextlib.contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Progress]:
    with ProgressBar(1.0) as bar:
        yield lambda done, total: bar.show(done / total, what, f"{done:,} of {total:,} {unit}")


def count_images(name: str, directory: pathlib.Path) -> dict[str, int]:
    """Opens each split, which verifies its files, and returns the number of its images."""
    from jepa_jax.config.groups import DataConfig
    from jepa_jax.data.sources import open_source

    data = DataConfig(source=name, dir=str(directory), image_size=IMAGE_SIZE[name])
    return {split: len(open_source(data, split)) for split in PREPARED_SPLITS}


PREPARE_DATA = Command("prepare-data", __doc__, add_flags, prepare_data)
