"""Downloads a data set, verifies it and prints the flags that use it.

  jepa-jax prepare-data cifar10 --dir=data/cifar10

An interrupted download continues where it stopped. Exit codes: 0 ready, 2 not possible (the message says what to do),
130 interrupted.
"""

import argparse
import pathlib

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser
from jepa_jax.data.download import RemoteFile, download

ARCHIVES = {
    "cifar10": RemoteFile(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        size=170_052_171,
        md5="c32a1d4ab5d03f1284b67883e8d87530",
    ),
}
IMAGE_SIZE = {"cifar10": 32}


def add_flags(parser: Parser) -> None:
    parser.add_argument("name", choices=sorted(ARCHIVES), help="the data set")
    parser.add_flag("dir", "DIR", "folder to keep it in; created if missing", required=True)


def prepare_data(arguments: argparse.Namespace, console: Console) -> Result:
    directory = pathlib.Path(arguments.dir).expanduser()
    archive = download_with_bar(ARCHIVES[arguments.name], directory)
    counts = {split: count_images(arguments.name, directory, split) for split in ("train", "test")}
    text = (
        f"{archive}: {counts['train']:,} train and {counts['test']:,} test images, checksum verified. Use it with\n"
        f"  --config.data.source={arguments.name} --config.data.dir={directory}"
    )
    return Result([{"source": arguments.name, "dir": str(directory), **counts}], text)


def download_with_bar(remote: RemoteFile, directory: pathlib.Path) -> pathlib.Path:
    """Downloads a file with a progress bar on standard error."""
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(remote.name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, console=RichConsole(stderr=True)) as bar:
        task = bar.add_task("download", total=remote.size)
        return download(remote, directory, lambda done, total: bar.update(task, completed=done, total=total))


def count_images(name: str, directory: pathlib.Path, split: str) -> int:
    """Opens a split, which verifies its files, and returns the number of its images."""
    from jepa_jax.config.groups import DataConfig
    from jepa_jax.data.sources import open_source

    return len(open_source(DataConfig(source=name, dir=str(directory), image_size=IMAGE_SIZE[name]), split))


PREPARE_DATA = Command("prepare-data", __doc__, add_flags, prepare_data)
main = PREPARE_DATA.main
