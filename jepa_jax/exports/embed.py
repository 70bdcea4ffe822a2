"""Features of all images of a folder, by name, or of the elements of an .npz file.

An interrupted computation of a folder is continued from its finished parts.
"""

import dataclasses
import functools
import hashlib
import io
import json
import os
import pathlib
import shutil
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jepa_jax.base.classes import import_extra
from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import file_digest, make_folder, user_path, write_atomically
from jepa_jax.data.photos.crops import centre_crop
from jepa_jax.data.photos.decode import Photo
from jepa_jax.data.readers.bounded import read_image_file
from jepa_jax.data.readers.folder import EXTENSIONS, no_images
from jepa_jax.data.readers.npz import read_npz_file
from jepa_jax.evals.features import FeatureCache, Split, delayed_by_one
from jepa_jax.evals.inference import load_encoder
from jepa_jax.program.checkpoint import params_sha256
from jepa_jax.weights.load import Geometry, load_model
from jepa_jax.weights.reader import CONFIG, weight_files

USUAL_SIZE = 224  # of public models that take images of any size
PART_IMAGES = 512  # after which features are written, so that they survive an interruption
SUFFIXES = (".npz", ".parquet")


@dataclasses.dataclass(frozen=True)
class Embedder:
    """Maps uint8 images [N, size, size, channels] to features [N, F] in float32; `identity` tells encoders apart."""

    encode: Callable[[np.ndarray], np.ndarray]
    size: int
    channels: int
    batch_size: int
    identity: str
    in_words: str
    shorter_side: int = 0  # pixels that the shorter side of an image is resized to; 0 = size


@dataclasses.dataclass(frozen=True)
class Embedded:
    """Features of the images of a folder, in the order of their names."""

    output: pathlib.Path
    names: Sequence[str]  # paths below the folder
    features: np.ndarray
    skipped: Sequence[str]  # paths of images that could not be read
    reused: int  # images whose features an earlier call had computed


def open_embedder(
    *, workdir: str | None, weights: str | None, batch_size: int = 64, image_size: int = 0, pool: str | None = None
) -> Embedder:
    """Returns the encoder of a run, or one with public or exported weights, whose size and pool can be changed."""
    if workdir:
        if image_size or pool:
            raise UserError("--image_size and --pool go with --weights; a run has its data.image_size and eval.pool")
        return _of_run(workdir, batch_size)
    assert weights
    model = load_model(weights)
    if pool:
        pools = getattr(model.encoder, "pools", ("mean",))
        if pool not in pools:
            raise UserError(f"--pool={pool}: the outputs of these weights can be pooled by {' or '.join(pools)}")
        model = dataclasses.replace(model, pool=pool)
    geometry = model.geometry.at(image_size or model.geometry.size or USUAL_SIZE)
    mean, std = (np.asarray(values, np.float32) for values in (model.mean, model.std))

    def encode(images: np.ndarray) -> np.ndarray:
        padded = np.pad(images, ((0, batch_size - len(images)), (0, 0), (0, 0), (0, 0)))  # one shape, one compilation
        pixels = (padded.astype(np.float32) / 255 - mean) / std
        if geometry.crop_size != geometry.size:  # as an evaluation of the run does
            shape = (batch_size, geometry.size, geometry.size, model.channels)
            pixels = np.asarray(jax.image.resize(pixels, shape, "linear"))
        return np.asarray(model.features(pixels))[: len(images)]

    files = [*weight_files(model.origin), *filter(pathlib.Path.is_file, [model.origin.with_name(CONFIG)])]
    facts = [[file_digest(path, "sha256") for path in files], geometry, model.pool, model.mean, model.std]
    shown_mean, shown_std = (", ".join(f"{value:.4g}" for value in values) for values in (model.mean, model.std))
    normal = f"normalised with mean ({shown_mean}) and deviation ({shown_std})"
    words = f"{model.origin} ({model.kind}): {_in_words(geometry)}, {normal}, pooled: {model.pool}"
    crop, shorter_side = geometry.crop_size, geometry.shorter_side
    return Embedder(encode, crop, model.channels, batch_size, json.dumps(facts), words, shorter_side)


def _of_run(workdir: str, batch_size: int) -> Embedder:
    encoder = load_encoder(workdir, batch_size=batch_size)
    if list(encoder.inputs) != ["image"]:
        takes = ", ".join(encoder.inputs)
        raise UserError(f"--workdir={workdir}: this encoder takes {takes}; put these arrays into --input=FILE.npz")
    config, size = encoder.config, encoder.image_size
    shorter_side = config.data.shorter_side
    kept = [config.to_dict()["data"]["augment"], config.eval.pool, config.eval.image_size, size, shorter_side]
    identity = json.dumps([params_sha256({"params": encoder.params, "stats": encoder.stats}), kept])
    seen = _in_words(Geometry(size, shorter_side=shorter_side).at(size))
    words = f"{workdir} ({config.model.name}): {seen}, pooled: {config.eval.pool}"
    return Embedder(encoder, size, encoder.channels, batch_size, identity, words, shorter_side)


def _in_words(geometry: Geometry) -> str:
    size, crop, shorter_side = geometry
    cropped = f" in the centre of {shorter_side}" if shorter_side != crop else ""
    return f"{crop} x {crop} pixels{cropped}" + (f", resized to {size} x {size}" if size != crop else "")


def embed_folder(
    embedder: Embedder,
    folder: str | pathlib.Path,
    output: str | pathlib.Path,
    *,
    skip: bool = False,
    console: Console,
) -> Embedded:
    """Writes and returns the features of all images below a folder; the same call continues an interrupted one.

    `output` is a .npz or .parquet file. Images that cannot be read raise UserError, or are left out with `skip`.
    """
    root, file = user_path(folder, "--input"), user_path(output, "--output")
    check_output(file)
    names = list_images(root)
    found = [(name, (root / name).stat() if (root / name).exists() else None) for name in names]
    stamps = [(name, [stat.st_size, stat.st_mtime_ns] if stat else []) for name, stat in found]
    identity = hashlib.sha256(json.dumps([embedder.identity, skip, stamps]).encode()).hexdigest()
    if (stored := read_features(file)) and stored[0] == identity:
        _, kept, features = stored
        return Embedded(file, kept, features, sorted(set(map(shown, names)) - set(kept)), len(kept))
    folder = file.with_name(f".{file.name}.parts")  # what is finished, so that it survives an interruption
    make_folder(folder)
    size = max(1, PART_IMAGES // embedder.batch_size) * embedder.batch_size
    cache, parts, reused = FeatureCache(folder, identity), [], 0
    console.start("features", len(names))
    for start in range(0, len(names), size):
        own, hits = names[start : start + size], cache.hits
        part = cache.get(f"{start:09d}", functools.partial(_computed, embedder, root, own, skip, console))
        if cache.hits > hits:
            reused += len(part.labels)
            console.advance(len(own))
        parts += [part] if len(part.labels) else []
    console.stop()
    if not parts:
        raise UserError(f"--input={root}: none of its {len(names)} images can be read; check the files")
    kept = [name for part in parts for name in part.labels.tolist()]
    features = np.concatenate([part.features for part in parts])
    write_features(file, identity, kept, features)
    shutil.rmtree(folder, ignore_errors=True)
    return Embedded(file, kept, features, sorted(set(map(shown, names)) - set(kept)), reused)


def embed_arrays(workdir: str, file: str | pathlib.Path, output: str | pathlib.Path, batch_size: int) -> Embedded:
    """Writes and returns the features of the elements in an .npz file, whose arrays are those that an encoder reads."""
    source, target = user_path(file, "--input"), user_path(output, "--output")
    check_output(target)
    content = read_npz_file(source)
    features = load_encoder(workdir, batch_size=batch_size)(content)
    names = [str(number) for number in range(len(features))]
    write_features(target, file_digest(source, "sha256"), names, features)
    return Embedded(target, names, features, (), 0)


def list_images(root: pathlib.Path) -> list[str]:
    if not root.is_dir():
        raise UserError(f"--input={root}: no such folder; give a folder of images")
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".")]
        paths = (pathlib.Path(folder, name) for name in files if not name.startswith("."))
        images = (path for path in paths if path.suffix.lower() in EXTENSIONS and not path.is_fifo())
        found += [path.relative_to(root).as_posix() for path in images]
    if not found:
        raise UserError(f"--input={root}: holds {no_images(root)}; give another folder")
    return sorted(found)


def _computed(embedder: Embedder, root: pathlib.Path, names: Sequence[str], skip: bool, console: Console) -> Split:
    """Returns features of the images that can be read, with names as labels; decodes a batch while another encodes."""

    def read(name: str) -> np.ndarray | None:
        try:
            photo = Photo(read_image_file(root / name), embedder.channels)
            return centre_crop(photo, embedder.size, embedder.shorter_side)
        except UserError:
            raise
        except Exception as error:  # image libraries raise nearly anything on damaged files
            if skip:
                return None
            reason = f"{type(error).__name__}: {error}"
            fix = "remove the file, or use --on_error=skip"
            raise UserError(f"{root / name}: cannot be read as an image ({reason}); {fix}") from error

    kept: list[str] = []
    features = [np.zeros((0, 0), np.float32)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        batches = (names[i : i + embedder.batch_size] for i in range(0, len(names), embedder.batch_size))
        for own, images in delayed_by_one((batch, pool.map(read, batch)) for batch in batches):
            readable = [(shown(name), image) for name, image in zip(own, images, strict=True) if image is not None]
            if readable:
                kept += [name for name, _ in readable]
                features.append(embedder.encode(np.stack([image for _, image in readable])))
            console.advance(len(own))
    return Split(np.concatenate(features[1:] or features), np.array(kept, str))


def check_output(file: pathlib.Path) -> None:
    """Raises UserError if features cannot be written to this file, or if it holds something else already."""
    if file.suffix not in SUFFIXES:
        raise UserError(f"--output={file}: ends neither with {' nor with '.join(SUFFIXES)}")
    if not file.parent.is_dir():
        raise UserError(f"--output={file}: there is no folder {file.parent}; make it first")
    if file.suffix == ".parquet":
        import_extra("pyarrow", f"--output={file}", "parquet")
    if file.exists() and read_features(file) is None:
        raise UserError(f"--output={file}: exists, and embed did not write it; give another file, or remove it first")


def write_features(file: pathlib.Path, identity: str, names: Sequence[str], features: np.ndarray) -> None:
    out = io.BytesIO()
    if file.suffix == ".npz":
        np.savez(out, names=np.array(names, str), features=features, identity=np.array(identity))
    else:
        import pyarrow
        import pyarrow.parquet

        lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(features.ravel()), features.shape[1])
        table = pyarrow.table({"name": pyarrow.array(names), "features": lists})
        pyarrow.parquet.write_table(table.replace_schema_metadata({"identity": identity}), out)
    write_atomically(file, out.getvalue())


def read_features(file: pathlib.Path) -> tuple[str, list[str], np.ndarray] | None:
    """Returns identity, names and features of a file of `write_features`; None if it is missing or something else."""
    if not file.is_file():
        return None
    try:
        if file.suffix == ".npz":
            with np.load(file) as stored:
                return str(stored["identity"]), stored["names"].tolist(), stored["features"]
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(file)
        flat = table["features"].combine_chunks().flatten().to_numpy()
        identity = (table.schema.metadata or {})[b"identity"].decode()
        return identity, table["name"].to_pylist(), flat.reshape(len(table), -1)
    except (OSError, KeyError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile):
        return None


def shown(name: str) -> str:
    """Returns a file name as valid text, whatever its bytes are."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
