"""Measures how many random crops of full photographs per second the loader delivers, beside torchvision's.

  python profiling/bench_loader.py [--photos=TAR_OR_FOLDER] [--torch_python=PYTHON]

500 JPEG photographs, enlarged to 500 x 500 pixels, are cropped twice each to 224 pixels by two worker processes: from
a folder, from ArrayRecord shards, and by torchvision under a PyTorch DataLoader (`torchvision_loader.py`) if torch and
torchvision are installed here or for --torch_python. Rounds alternate; figures are medians of the rounds.

Without --photos, pictures of shapes are used, which compress better than photographs. `torchvision_views_per_sec` and
`ratio` are of torchvision's standard transforms (crop, flip, ToTensor); `lean_ratio` compares with a crop and
PILToTensor alone. `decode_bound` is what as many threads deliver if nothing but the decoding takes time.
"""

import io
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

VIEWS = 2
TORCH_SCRIPT = pathlib.Path(__file__).with_name("torchvision_loader.py")
VARIANTS = ("standard", "lean")


def add_flags(parser: Parser) -> None:
    parser.add_flag("photos", "PATH", "tar file or folder of JPEG images; by default pictures of shapes")
    parser.add_flag("torch_python", "PYTHON", "interpreter with torch and torchvision", sys.executable)
    parser.add_flag("count", "N", "photographs", 500, least=50)
    parser.add_flag("side", "N", "pixels per side that they are enlarged to", 500, least=32)
    parser.add_flag("size", "N", "pixels per side of a crop", 224, least=8)
    parser.add_flag("batch_size", "N", "photographs per batch", 32, least=2)
    parser.add_flag("workers", "N", "worker processes of each loader", 2, least=1)
    parser.add_flag("batches", "N", "batches that a measurement takes", 40, least=1)
    parser.add_flag("rounds", "N", "measurements of each loader", 3, least=1)


def originals(photos: str | None, count: int) -> Iterator[bytes]:
    """Yields the contents of image files."""
    from PIL import Image

    if photos is None:
        from jepa_jax.data.synthetic import render_shapes

        for image in render_shapes(np.arange(count), size=224, seed=0, split="train")["image"]:
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, format="PNG")
            yield buffer.getvalue()
    elif pathlib.Path(photos).is_dir():
        for file in sorted(f for f in pathlib.Path(photos).rglob("*") if f.suffix.lower() in (".jpg", ".jpeg")):
            yield file.read_bytes()
    else:
        with tarfile.open(photos) as archive:
            for member in archive:
                if member.isfile() and member.name.lower().endswith((".jpg", ".jpeg")):
                    content = archive.extractfile(member)
                    assert content is not None  # a regular file
                    yield content.read()


def make_photos(folder: pathlib.Path, arguments: Arguments) -> None:
    """Writes enlarged photographs into two class folders."""
    from PIL import Image

    made, side = 0, (arguments.side, arguments.side)
    for made, content in enumerate(originals(arguments.photos, arguments.count), start=1):
        place = folder / "train" / f"class_{made % 2}"
        place.mkdir(parents=True, exist_ok=True)
        image = Image.open(io.BytesIO(content)).convert("RGB").resize(side, Image.Resampling.BICUBIC)
        image.save(place / f"{made:05}.jpg", quality=90)
        if made == arguments.count:
            break
    if made < arguments.count:
        raise UserError(f"--photos={arguments.photos}: holds {made} JPEG images; use --count={made} or more images")
    for label in range(2):  # a folder has a test split
        place = folder / "test" / f"class_{label}"
        place.mkdir(parents=True)
        image.save(place / "0.jpg")


def own_rate(source: str, folder: pathlib.Path, arguments: Arguments) -> float:
    """Returns the views per second that our loader delivers, on the device."""
    import jax

    from jepa_jax.config.augment import CropConfig, Crops
    from jepa_jax.config.groups import DataConfig
    from jepa_jax.data.pipeline import batches_ready, train_batches
    from jepa_jax.data.sources import open_source
    from jepa_jax.runtime.mesh import batch_sharding, make_mesh

    data = DataConfig(
        source=source, dir=str(folder), image_size=arguments.size, batch_size=arguments.batch_size,
        num_workers=arguments.workers, crops="loader",
    )  # fmt: skip
    crops = {"crops": Crops(VIEWS, arguments.size, CropConfig(scale=(0.2, 1.0)))}
    sharding = batch_sharding(make_mesh(1, 1, jax.devices()[:1]))
    with train_batches(data, open_source(data, "train"), seed=0, sharding=sharding, crops=crops) as batches:
        for _ in range(1 + batches_ready(data)):  # workers start; what is ready was made before
            next(batches)
        start = time.perf_counter()
        for _ in range(arguments.batches):
            jax.block_until_ready(next(batches)[0])
        return VIEWS * arguments.batches * arguments.batch_size / (time.perf_counter() - start)


def torch_rate(variant: str, folder: pathlib.Path, arguments: Arguments) -> dict[str, Any] | None:
    """Returns what `torchvision_loader.py` prints; None if it cannot run."""
    numbers = (arguments.size, arguments.batch_size, arguments.workers, arguments.batches)
    command = [arguments.torch_python, str(TORCH_SCRIPT), str(folder / "train"), *map(str, numbers), variant]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        return None
    return json.loads(ended.stdout.splitlines()[-1])


def decode_rate(folder: pathlib.Path, arguments: Arguments) -> float:
    """Returns the views per second of as many threads as there are workers, if nothing but decoding took time."""
    from jepa_jax.data.photos.decode import Photo

    contents = [file.read_bytes() for file in sorted((folder / "train").rglob("*.jpg"))]
    with ThreadPoolExecutor(arguments.workers) as pool:
        start = time.perf_counter()
        list(pool.map(lambda content: Photo(content, 3).pixels().shape, contents))  # releases the interpreter lock
        return VIEWS * len(contents) / (time.perf_counter() - start)


def bench(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.config.groups import DataConfig
    from jepa_jax.data.readers.folder import FolderSource
    from jepa_jax.data.readers.shards import write_shards

    with tempfile.TemporaryDirectory() as temporary:
        folder, shards = pathlib.Path(temporary, "folder"), pathlib.Path(temporary, "shards")
        console.line("writing photographs")
        make_photos(folder, arguments)
        data = DataConfig(source="folder", dir=str(folder))
        write_shards({split: FolderSource(data, split) for split in ("train", "test")}, shards)
        rates: dict[str, list[float]] = {name: [] for name in ("folder", "shards", "decoding", *VARIANTS)}
        versions: dict[str, str] = {}
        for number in range(arguments.rounds):
            console.line(f"round {number + 1} of {arguments.rounds}")
            rates["folder"].append(own_rate("folder", folder, arguments))
            rates["shards"].append(own_rate("shards", shards, arguments))
            rates["decoding"].append(decode_rate(folder, arguments))
            for variant in VARIANTS:
                if measured := torch_rate(variant, folder, arguments):
                    rates[variant].append(measured["views_per_sec"])
                    versions = {name: measured[name] for name in ("torch", "torchvision")}
    return Result([row := summary(rates) | versions | {"load": os.getloadavg()[0]}], in_words(row))


def summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Returns medians, ratios of medians, and all rounds."""
    middle = {name: statistics.median(values) if values else None for name, values in rates.items()}

    def ratio(variant: str) -> float | None:
        return round(middle["folder"] / middle[variant], 3) if middle["folder"] and middle[variant] else None

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 1)

    return {
        "views_per_sec": rounded(middle["folder"]),
        "shards_views_per_sec": rounded(middle["shards"]),
        "torchvision_views_per_sec": rounded(middle["standard"]),
        "ratio": ratio("standard"),
        "lean_torchvision_views_per_sec": rounded(middle["lean"]),
        "lean_ratio": ratio("lean"),
        "decode_bound": rounded(middle["decoding"]),
        "rounds": {name: [rounded(value) for value in values] for name, values in rates.items()},
    }


def in_words(row: dict[str, Any]) -> str:
    lines = [
        f"folder {row['views_per_sec']:,} views/s, shards {row['shards_views_per_sec']:,}; bound by decoding "
        f"{row['decode_bound']:,}"
    ]
    if row["ratio"]:
        lines.append(
            f"torchvision {row['torchvision_views_per_sec']:,} views/s (ratio {row['ratio']}), crop and PILToTensor "
            f"alone {row['lean_torchvision_views_per_sec']:,} (ratio {row['lean_ratio']})"
        )
    else:
        lines.append("torchvision: not measured; needs torch and torchvision (--torch_python)")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(Command("profiling/bench_loader.py", __doc__, add_flags, bench, program="python").main())
