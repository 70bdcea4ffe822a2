"""tuned.json: the settings that a search chose for a machine, what they promise, and how training takes them.

What the user writes on the command line wins over the file, and the file over the config: `--tuned=FILE
--config.data.num_workers=0` trains with the file's settings and no workers.
"""

import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import write_json
from jepa_jax.config.schema import COMMON, flatten
from jepa_jax.tuning.trial import KNOBS, Combination

KIND, VERSION = "jepa_jax.tuned", 1
MACHINE_KEYS = ("cpu", "cores", "gpu_name")
# Keys that decide how fast a step is, besides the tuned ones.
SPEED_KEYS = ("method.", "model.", "data.", "mesh.")
NO_SPEED_KEYS = ("data.dir", "data.seed", "data.on_error", "data.num_train", "data.num_test")


def write_tuned(path: str | pathlib.Path, combination: Combination, **facts: Any) -> None:
    """`facts`: samples_per_sec, samples_per_sec_ci95, confirmed, gain, hardware, config, text and so on."""
    overrides = {key: getattr(combination, knob) for knob, key in KNOBS.items()}
    write_json(path, {"kind": KIND, "version": VERSION, "overrides": overrides, **facts})


def read_tuned(path: str | pathlib.Path) -> dict[str, Any]:
    """The file's content; whatever is not such a file is refused with what to do."""
    fix = "give the tuned.json of scripts/tune.py"
    try:
        tuned = json.loads(pathlib.Path(path).expanduser().read_text())
    except OSError as error:
        raise UserError(f"--tuned={path}: cannot be read ({error.strerror}); {fix}") from None
    except ValueError:
        raise UserError(f"--tuned={path}: not JSON; {fix}") from None
    if not isinstance(tuned, dict) or tuned.get("kind") != KIND or not isinstance(tuned.get("overrides"), dict):
        raise UserError(f"--tuned={path}: not a file of tuned settings; {fix}")
    if tuned.get("version") != VERSION:
        raise UserError(
            f"--tuned={path}: version {tuned.get('version')!r}, this is {VERSION}; run scripts/tune.py again"
        )
    for key, value in tuned["overrides"].items():
        if key not in KNOBS.values():
            raise UserError(f"--tuned={path}: {key} is no tuned setting; {fix}, unchanged")
        if not isinstance(value, COMMON[key].kind) or isinstance(value, bool):
            raise UserError(
                f"--tuned={path}: {key} = {value!r} is not of type {COMMON[key].kind.__name__}; {fix}, unchanged"
            )
    return tuned


def use_tuned(config: Any, path: str, explicit: Collection[str], console: Console) -> None:
    """Applies a file to the config of a run, and says what it did and why its promise may not hold here."""
    from jepa_jax.runtime.provenance import describe_hardware

    tuned = read_tuned(path)
    for line in doubts(config, tuned, describe_hardware(None)):
        console.warn(line)
    for line in apply_tuned(config, tuned, explicit):
        console.line(line)


def apply_tuned(config: Any, tuned: Mapping[str, Any], explicit: Collection[str] = ()) -> list[str]:
    """Sets the file's values in a ConfigDict, except `explicit` keys; returns lines that say what was done."""
    lines, as_measured = [], True
    batch_before = config.data.batch_size
    for key, value in tuned["overrides"].items():
        group, name = key.split(".")
        given = config[group][name]
        if given == value:
            continue
        if key in explicit:
            lines.append(f"tuned: {key} = {given} as on the command line, not {value} as in the file")
            as_measured = False
        else:
            lines.append(f"tuned: {key} {given} -> {value}")
            config[group][name] = value
    lines = lines or ["tuned: the config has these settings already"]
    promised = tuned.get("samples_per_sec")
    if promised and as_measured:
        lines.append(f"tuned: {promised:,.0f} images/s were measured with these settings")
    if config.data.batch_size != batch_before:
        lines.append(rate_line(config, batch_before))
    return lines


def rate_line(config: Any, batch_before: int) -> str:
    """What another batch makes of the learning rate."""
    from jepa_jax.program.optim import scaled_learning_rate

    optim, batch = config.optim, config.data.batch_size
    before, after = (
        scaled_learning_rate(optim.lr, size, optim.batch_scaling, optim.reference_batch)
        for size in (batch_before, batch)
    )
    rate = f"{before:.3g} -> {after:.3g}" if before != after else f"{after:.3g} as before"
    return (
        f"tuned: the batch has changed from {batch_before:,} to {batch:,} images; the peak learning rate is {rate} "
        f"(optim.lr = {optim.lr:g}, optim.batch_scaling = {optim.batch_scaling})"
    )


def doubts(config: Mapping[str, Any], tuned: Mapping[str, Any], hardware: Mapping[str, Any]) -> list[str]:
    """Why what the file promises may not hold here: another machine, or another model."""
    found = []
    there = tuned.get("hardware") or {}
    other = [f"{key} {there.get(key)} there, {hardware.get(key)} here" for key in MACHINE_KEYS
             if there.get(key) != hardware.get(key)]  # fmt: skip
    if other:
        found.append(f"tuned on another machine ({'; '.join(other)}): run scripts/tune.py on this one")
    before, now = flatten(tuned.get("config") or {}), flatten(config)
    skipped = (*KNOBS.values(), *NO_SPEED_KEYS)
    keys = [
        key
        for key in sorted(before.keys() | now.keys())
        if before and key.startswith(SPEED_KEYS) and key not in skipped and before.get(key) != now.get(key)
    ]
    if keys:
        named = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
        found.append(f"tuned for another config (other {named}): the speed it promises may not be reached")
    if tuned.get("data_source") == "dummy" and config["data"]["source"] != "shapes":  # which are drawn as well
        found.append("tuned with drawn images (--use_dummy_data): loading those of this config may be slower")
    if tuned.get("confirmed") is False:
        found.append("tuned, but not confirmed by a longer run: it may run out of memory")
    return found
