#!/usr/bin/env python3
"""Downloads a data set, verifies it and prints the flags that use it.

    python scripts/prepare_data.py cifar10 --dir=data/cifar10

An interrupted download goes on where it stopped. Exit codes: 0 ready, 2 not possible (the message says what to do),
130 interrupted.
"""

import argparse
import json
import pathlib
import sys

from jepa_jax.base.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from jepa_jax.data.download import RemoteFile, download

ARCHIVES = {
    "cifar10": RemoteFile(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        size=170_052_171,
        md5="c32a1d4ab5d03f1284b67883e8d87530",
    ),
}
IMAGE_SIZE = {"cifar10": 32}


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    directory = pathlib.Path(arguments.dir).expanduser()
    try:
        archive = fetch_with_bar(ARCHIVES[arguments.name], directory)
        counts = {split: count_images(arguments.name, directory, split) for split in ("train", "test")}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(f"{archive}: {counts['train']:,} train and {counts['test']:,} test images, checksum verified. Use it with")
    print(f"  --config.data.source={arguments.name} --config.data.dir={directory}")
    print(json.dumps({"source": arguments.name, "dir": str(directory), **counts}))
    return EXIT_OK


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(ARCHIVES), help="the data set")
    parser.add_argument("--dir", required=True, help="the folder to keep it in; made if missing")
    return parser.parse_args(argv)


def fetch_with_bar(remote: RemoteFile, directory: pathlib.Path) -> pathlib.Path:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(remote.name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("download", total=remote.size, start=False)

        def show(done: int, total: int) -> None:
            if not bar.tasks[task].started:
                bar.start_task(task)
            bar.update(task, completed=done, total=total)

        return download(remote, directory, show)


def count_images(name: str, directory: pathlib.Path, split: str) -> int:
    from jepa_jax.config.groups import DataConfig
    from jepa_jax.data.sources import open_source

    return len(open_source(DataConfig(source=name, dir=str(directory), image_size=IMAGE_SIZE[name]), split))


if __name__ == "__main__":
    sys.exit(main())
