"""tuned.json: the settings that a search chose for a machine, the speed that was measured, and how training uses them.

What the user writes on the command line wins over the file, and the file over the config: `--tuned=FILE
--config.data.num_workers=0` trains with the file's settings and no workers.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json, user_path, write_json
from jepa_jax.base.text import first_of, number
from jepa_jax.config.groups import Config
from jepa_jax.config.schema import differing, flatten
from jepa_jax.experiments.recommendation import learning_rate_advice
from jepa_jax.experiments.settings import KNOBS, Combination
from jepa_jax.program.config import changed_config
from jepa_jax.runtime.allocator import OLD_POOL_VARIABLE, POOL_VARIABLE, pool_fraction, pool_variables
from jepa_jax.runtime.provenance import describe_hardware

KIND, VERSION = "jepa_jax.tuned", 1
MACHINE_KEYS = ("cpu", "cores", "gpu_name")
TUNED_TYPES: dict[str, Any] = {KNOBS[field.name].key: field.type for field in dataclasses.fields(Combination)}
# What a file may say besides its settings, and what that must be.
FACTS: dict[str, Callable[[Any], bool]] = {
    "samples_per_sec": lambda value: not isinstance(value, str) and (number(value) or 0) > 0,
    "memory_fraction": lambda value: not isinstance(value, str) and 0 < (number(value) or 0) <= 1,
    "hardware": lambda value: isinstance(value, Mapping),
    "config": lambda value: isinstance(value, Mapping),
}
# Keys that decide how fast a step is, besides the tuned ones.
SPEED_KEYS = ("method.", "model.", "data.", "mesh.")
NO_SPEED_KEYS = ("data.dir", "data.seed", "data.on_error", "data.num_train", "data.num_test")


def write_tuned(path: str | pathlib.Path, combination: Combination, **facts: Any) -> None:
    """Writes the settings of a combination; `facts`: samples_per_sec, confirmed, hardware, config, text and so on."""
    write_json(path, {"kind": KIND, "version": VERSION, "overrides": combination.as_overrides(), **facts})


def read_tuned(path: str | pathlib.Path) -> dict[str, Any]:
    """Reads a file of tuned settings; rejects any other file."""
    fix = "give the tuned.json of jepa-jax tune as --tuned"
    tuned = read_json(user_path(path, "--tuned"), fix)
    if (tuned.get("kind"), tuned.get("version")) != (KIND, VERSION) or not isinstance(tuned.get("overrides"), dict):
        raise UserError(f"--tuned={path}: not a file of tuned settings of version {VERSION}; {fix}")
    for key, value in tuned["overrides"].items():
        if type(value) is not TUNED_TYPES.get(key):
            raise UserError(f"--tuned={path}: {key} = {value!r} is not a tuned setting; {fix}, unchanged")
    for key, fits in FACTS.items():
        if tuned.get(key) is not None and not fits(tuned[key]):
            raise UserError(f"--tuned={path}: {key} = {str(tuned[key])[:100]} cannot be; {fix}, unchanged")
    return tuned


def use_tuned(config: Config, path: str, explicit: Collection[str], console: Console) -> Config:
    """Returns a config with the settings of a file; says what it changed, and warns if the speed may not hold here."""
    tuned = read_tuned(path)
    hardware = describe_hardware(None)
    for line in doubts(config, tuned, hardware):
        console.warn(line)
    if hardware["gpu_name"] and (said := use_memory_fraction(tuned.get("memory_fraction"), os.environ)):
        console.line(said)
    config, lines = apply_tuned(config, tuned, explicit)
    for line in lines:
        console.line(line)
    return config


def use_memory_fraction(tuned: float | None, environment: MutableMapping[str, str]) -> str:
    """Makes JAX, before it starts, take the share of the GPU's memory that the trials had, if no variable says else.

    Returns what was done in words, or "".
    """
    given = pool_fraction(environment)
    if tuned in (None, given):
        return ""
    if any(environment.get(name) for name in (POOL_VARIABLE, OLD_POOL_VARIABLE)):
        return f"tuned: JAX takes {given:g} of the GPU's memory as the environment says, not {tuned:g} as in the trials"
    environment.update(pool_variables(tuned, environment))
    return f"tuned: JAX takes {tuned:g} of the GPU's memory ({POOL_VARIABLE}), as in the trials"


def apply_tuned(config: Config, tuned: Mapping[str, Any], explicit: Collection[str] = ()) -> tuple[Config, list[str]]:
    """Returns a config with the file's values, except those of `explicit` keys, and lines that say what was done."""
    lines, changes, before = [], {}, flatten(config)
    for key, value in tuned["overrides"].items():
        given = before[key]
        if given == value:
            continue
        if key in explicit:
            lines.append(f"tuned: {key} = {given} as on the command line, not {value} as in the file")
        else:
            lines.append(f"tuned: {key} {given} -> {value}")
            changes[key] = value
    if tuned.get("samples_per_sec") and len(changes) == len(lines):
        lines.append(f"tuned: {tuned['samples_per_sec']:,.0f} samples/s were measured with these settings")
    changed = changed_config(config, changes)
    if advice := learning_rate_advice(config, changed.data.batch_size):
        lines.append(f"tuned: {advice['text']}")
    return changed, lines


def doubts(config: Config, tuned: Mapping[str, Any], hardware: Mapping[str, Any]) -> list[str]:
    """Returns why the speed in the file may not be reached here: another machine, another model, other data."""
    found = []
    there = tuned.get("hardware") or {}
    other = [
        f"{key} {there.get(key)} there, {hardware.get(key)} here"
        for key in MACHINE_KEYS
        if there.get(key) != hardware.get(key)
    ]
    if other:
        found.append(f"tuned on another machine ({'; '.join(other)}): run jepa-jax tune on this one")
    skipped, before = {knob.key for knob in KNOBS.values()}.union(NO_SPEED_KEYS), tuned.get("config")
    others = differing(before, config) if before else ()
    if keys := [key for key in others if key.startswith(SPEED_KEYS) and key not in skipped]:
        found.append(f"tuned for another config (other {first_of(keys, 4)}): its speed may not be reached")
    if tuned.get("data_source") == "dummy" and config.data.source != "shapes":  # which are drawn as well
        found.append("tuned with drawn images (--use_dummy_data): loading those of this config may be slower")
    if tuned.get("confirmed") is False:
        found.append("tuned, but not confirmed by a longer run: it may run out of memory")
    return found
