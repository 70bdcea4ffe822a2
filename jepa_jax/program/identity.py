"""What a run is made with: its config, data and code. Each checkpoint says so, and a run that continues is compared."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.config.resolve import resolve_stored
from jepa_jax.config.schema import differing, differing_keys, flatten
from jepa_jax.program.checksums import read_manifest

PARTS = ("config", "data", "code")  # of an identity
# Keys, or beginnings of keys, that change how a run is executed but not its result: a resumed run may change them.
FREE_ON_RESUME = (
    "data.dir",
    "data.num_workers",
    "data.worker_threads",
    "data.worker_timeout",
    "data.prefetch",
    "data.pipeline",
    "train.checkpoint_",
    "train.deterministic",
    "train.mirror",
    "mesh.",
    "log.",
    "profile.",
)
LENGTH = ("optim.epochs", "train.max_steps")
EXTENSIBLE = ("constant", "wsd")  # schedules whose rates before the end do not depend on where the end is


def check_parts(allowed: Sequence[str]) -> None:
    """Raises UserError if a part that may differ has an unknown name."""
    if unknown := [part for part in allowed if part not in PARTS]:
        raise UserError(f"--allow_changed={','.join(allowed)}: {unknown[0]!r} is not one of {', '.join(PARTS)}")


def check_identities(
    folders: Iterable[pathlib.Path], identity: Mapping[str, Any], allowed: Sequence[str] = ()
) -> list[str]:
    """Refuses checkpoints that were made with other parts than the `allowed` ones; returns notes about the rest."""
    notes = []
    manifests = {folder: read_manifest(folder) for folder in folders}
    for folder, manifest in manifests.items():
        if not manifest.keys() & set(PARTS):
            continue
        found = {part: part_differences(part, manifest.get(part), identity[part]) for part in PARTS}
        differing = [part for part in PARTS if found[part]]
        lines = "\n  ".join(line for part in differing for line in found[part])
        if set(differing) - set(allowed):
            raise UserError(
                f"{folder}: was made with other {' and '.join(differing)}; put back what has changed, use another "
                f"--workdir, or continue all the same with --allow_changed={','.join(differing)}:\n  {lines}"
            )
        if differing:
            notes.append(f"{folder}: was made with other {' and '.join(differing)}, as allowed:\n  {lines}")
    if manifests and not any(manifest.keys() & set(PARTS) for manifest in manifests.values()):
        names = f"{next(iter(manifests))}: does not say what it was made with (of an earlier version)"
        notes.append(f"{names}; nothing is compared")
    return notes


def part_differences(part: str, stored: Any, now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each thing in which two parts of that name differ; what is "" is unknown."""
    stored = stored if isinstance(stored, Mapping) else {}
    if part == "config":
        return config_differences(stored, now)
    found = differing(stored, now).items()
    return [f"{part}.{name}: {before} -> {after}" for name, (before, after) in found if "" not in (before, after)]


def config_differences(stored: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Returns a line for each key that decides about results and differs from a stored config.

    A run may become longer, if the rates of the steps that it has taken stay the same.
    """
    before = resolve_stored(stored, config).to_dict()
    free = tuple(f"config.{key}" for key in FREE_ON_RESUME)
    longer = tuple(f"config.{key}:" for key in LENGTH) if is_longer(before, config) else ()
    return [line for line in differing_keys(before, config) if not line.startswith((*free, *longer))]


def is_longer(stored: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Returns whether a config continues the run of another one to more epochs or steps."""
    before, after = flatten(stored), flatten(config)
    grows = [(before[key], after[key]) for key in LENGTH if before[key] != after[key]]
    return after["optim.schedule"] in EXTENSIBLE and len(grows) == 1 and 0 < grows[0][0] < grows[0][1]
