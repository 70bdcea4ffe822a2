"""Checksums of checkpoints: which files make up a whole one, and which of them are damaged."""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import sync_folder, write_atomically

CHECKSUMS = "checksums.json"
METADATA = "_CHECKPOINT_METADATA"  # of Orbax; holds the manifest
LOOKS = 3  # at most, at a folder that a training writes to
MARK = {"checksums": CHECKSUMS}  # in the manifest of every checkpoint that is written with checksums
PARTS = (METADATA, "state/_METADATA", "state/manifest.ocdbt", "progress/metadata")  # of every checkpoint


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the files of a checkpoint tell.

    Attributes:
      damage: a line for each damaged file; empty if it is whole.
      verified: whether its checksums say so; checkpoints of earlier versions have none.
    """

    step: int
    folder: pathlib.Path
    damage: tuple[str, ...]
    verified: bool

    @property
    def whole(self) -> bool:
        return not self.damage

    def in_words(self) -> str:
        more = f", and {len(self.damage) - 1} more" if len(self.damage) > 1 else ""
        return f"{self.folder} is damaged: {self.damage[0]}{more}"


def write_checksums(folder: pathlib.Path) -> None:
    """Writes the size and the SHA-256 of every file into the folder; returns when all of it is on disk."""
    table = _table(folder, sync=True)
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_folder(path)
    write_atomically(folder / CHECKSUMS, _as_text(table))


def verify(folder: pathlib.Path) -> Verdict:
    """Reads every file of a checkpoint, compares it with its checksum, and its step with the name of the folder."""
    step = int(folder.name.removeprefix("step_"))
    try:
        has_checksums = (folder / CHECKSUMS).is_file()
        damage = _differences(folder) if has_checksums else _missing_parts(folder)
        saved = read_manifest(folder).get("step", step)
        if not damage and saved != step:
            damage = [f"renamed: it is the checkpoint of step {saved}, so call it step_{saved} again"]
        return Verdict(step, folder, tuple(damage), has_checksums)
    except OSError as error:
        return Verdict(step, folder, (f"{error.filename or folder}: cannot be read ({error.strerror})",), False)


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what a checkpoint says of itself: its step, and what it was made with; {} if it says nothing."""
    try:
        manifest = json.loads((folder / METADATA).read_bytes())["custom_metadata"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def step_folders(directory: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """Returns step and folder of all checkpoints, damaged ones included, the newest first.

    Raises UserError if the directory cannot be read: taken for empty, the run would start anew in it.
    """
    try:
        names = [name.removeprefix("step_") for name in os.listdir(directory) if name.startswith("step_")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{directory}: cannot be read ({error.strerror}); check it and its permissions") from error
    return sorted(((int(name), directory / f"step_{name}") for name in names if name.isdecimal()), reverse=True)


def newest_whole(directory: pathlib.Path) -> tuple[Verdict | None, list[Verdict]]:
    """Returns the newest whole checkpoint, or None, and the damaged ones that are newer."""
    for _ in range(LOOKS):
        listed = step_folders(directory)
        verdicts = []
        for _, folder in listed:
            verdicts.append(verify(folder))
            if verdicts[-1].whole:
                break
        damaged = [verdict for verdict in verdicts if not verdict.whole]
        if not damaged or step_folders(directory) == listed:
            break  # otherwise a training has replaced what looks damaged meanwhile
    return next((verdict for verdict in verdicts if verdict.whole), None), damaged


def _table(folder: pathlib.Path, *, sync: bool = False) -> dict[str, list[int | str]]:
    """Returns size and digest of each file by its name."""
    table: dict[str, list[int | str]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name == CHECKSUMS:
            continue
        if not path.is_file():
            table[name] = [0, "not a file"]
            continue
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            table[name] = [file.tell(), digest]
            if sync:
                os.fsync(file.fileno())
    return table


def _as_text(table: dict[str, list[int | str]]) -> str:
    return json.dumps({"algorithm": "sha256", "files": table}, indent=1, sort_keys=True) + "\n"


def _differences(folder: pathlib.Path) -> list[str]:
    """Returns what differs from the checksums; the text must be the same, so that they vouch for themselves too."""
    found = _table(folder)
    stored = (folder / CHECKSUMS).read_bytes()
    if stored == _as_text(found).encode():
        return []
    try:
        files = json.loads(stored)["files"]
        expected = {name: (int(size), str(digest)) for name, (size, digest) in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return [f"{CHECKSUMS}: not readable"]
    lines = [f"{name}: missing" for name in expected.keys() - found.keys()]
    lines += [f"{name}: not part of the checkpoint" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        size, digest = found[name]
        if size != expected[name][0]:
            lines.append(f"{name}: {size:,} instead of {expected[name][0]:,} bytes")
        elif digest != expected[name][1]:
            lines.append(f"{name}: content differs from its checksum")
    return sorted(lines) or [f"{CHECKSUMS}: content differs from what was written"]


def _missing_parts(folder: pathlib.Path) -> list[str]:
    """Returns what is wrong with a checkpoint without checksums, as far as one can tell."""
    missing = [name for name in PARTS if not (folder / name).is_file() or not (folder / name).stat().st_size]
    if not missing and CHECKSUMS in (folder / METADATA).read_text(errors="replace"):
        missing = [CHECKSUMS]  # it had them
    return [f"{name}: missing or empty" for name in missing]
