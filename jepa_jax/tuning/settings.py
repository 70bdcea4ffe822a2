"""The settings that trials vary: combinations, requests to measure one, grids from flags, and files of flags."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_toml
from jepa_jax.base.text import parse_numbers
from jepa_jax.config.schema import COMMON

# Knobs of a combination and the config keys that they set.
KNOBS = {
    "batch_size": "data.batch_size",
    "num_workers": "data.num_workers",
    "grad_accum_steps": "train.accum_steps",
    "precision": "train.precision",
    "remat": "train.remat",
    "pipeline": "data.pipeline",
}
# Flag of each knob, in the order of the grid: the last one changes fastest.
FLAGS = {
    "batch_sizes": "batch_size",
    "num_workers": "num_workers",
    "grad_accum": "grad_accum_steps",
    "precisions": "precision",
    "remats": "remat",
    "pipelines": "pipeline",
}
OTHER_FLAGS = (
    "config", "max_batches", "warmup_batches", "repeats", "gpu_index", "use_dummy_data", "time_limit",
    "fixed_effective_batch", "output_json",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Combination:
    """A value of every knob; `batch_size` counts the images of one optimizer step, accumulation included."""

    batch_size: int
    num_workers: int
    grad_accum_steps: int
    precision: str
    remat: str
    pipeline: str

    @property
    def label(self) -> str:
        parts = f"batch {self.batch_size}" + (f" in {self.grad_accum_steps}" if self.grad_accum_steps > 1 else "")
        workers = f"{self.num_workers} worker{'s' * (self.num_workers != 1)}"
        return f"{parts}, {workers}, {self.precision}, remat {self.remat}, {self.pipeline}"

    @property
    def part_size(self) -> float:
        """Images that are computed at a time."""
        return self.batch_size / self.grad_accum_steps

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Combination":
        return cls(**{name: values[name] for name in KNOBS})

    @classmethod
    def of(cls, config: Any) -> "Combination":
        """Returns the settings that a config has by itself."""
        return cls(**{name: functools.reduce(getattr, key.split("."), config) for name, key in KNOBS.items()})

    def apply(self, config: Any) -> Any:
        """Returns a copy of a config with these settings."""
        return with_keys(config, {key: getattr(self, name) for name, key in KNOBS.items()})


def with_keys(config: Any, values: Mapping[str, Any]) -> Any:
    """Returns a copy of a config with other values of some keys, for example {"data.batch_size": 64}."""
    changed = config.copy_and_resolve_references()
    for key, value in values.items():
        group, name = key.split(".")
        changed[group][name] = value
    return changed


@dataclasses.dataclass(frozen=True)
class TrialRequest:
    """What the process of a trial is asked to measure.

    Attributes:
      config: nested values of the config as given; the combination is applied to it.
      max_batches: batches that are measured.
      warmup_batches: batches before those, after compiling.
      use_dummy_data: images are drawn by the loader's workers instead of read from the config's data.
      gpu_index: the only GPU that the process sees; None for all.
      with_evaluation: run a validation pass and write a checkpoint before the measured steps.
    """

    config: Mapping[str, Any]
    combination: Combination
    max_batches: int = 32
    warmup_batches: int = 4
    use_dummy_data: bool = False
    gpu_index: int | None = None
    with_evaluation: bool = False

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrialRequest":
        return cls(**{**values, "combination": Combination.from_dict(values["combination"])})

    def configuration(self) -> Any:
        """Returns the config that is measured; lists of a request that was read from JSON become tuples again."""
        from ml_collections import ConfigDict

        return self.combination.apply(ConfigDict(_with_tuples(self.config)))


def _with_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_tuples(part) for name, part in value.items()}
    return tuple(_with_tuples(part) for part in value) if isinstance(value, list | tuple) else value


def grid_values(config: Any, texts: Mapping[str, str | None]) -> dict[str, list[Any]]:
    """Returns the values of each flag in FLAGS from its text; a flag without text has the config's own value.

    Batch sizes are sorted, so that the smallest one that does not fit is met first and the larger ones are skipped.
    """
    own = Combination.of(config)
    values: dict[str, list[Any]] = {}
    for flag, knob in FLAGS.items():
        text, key = texts.get(flag), COMMON[KNOBS[knob]]
        if text is None:
            values[flag] = [getattr(own, knob)]
        elif key.kind is int:
            values[flag] = parse_numbers(flag, text, int, key.least or 0)
        else:
            values[flag] = parse_choices(flag, text, key.choices)
    values["batch_sizes"].sort()
    return values


def parse_choices(flag: str, text: str, choices: Sequence[str]) -> list[str]:
    """Parses "a,b" to ["a", "b"], in the given order, without repeats."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for part in found:
        if part not in choices:
            raise UserError(f"--{flag} = {text}: {part!r} is not one of {', '.join(choices)}")
    return found


def with_study(arguments: Sequence[str]) -> list[str]:
    """Replaces --study=FILE (or --study FILE) in a command line by the flags of that file; other arguments win."""
    files, own = [], []
    rest = iter(arguments[1:])
    for argument in rest:
        if not re.fullmatch(r"--?study(=.*)?", argument):
            own.append(argument)
            continue
        file = argument.partition("=")[2] or next(rest, "")
        if not file:
            raise UserError(f"{argument}: no file; write --study=FILE, see profiling/sweeps/")
        files.append(file)
    if not files:
        return list(arguments)
    given = {flag_name(argument) for argument in own}
    added = [flag for key, flag in study_flags(pathlib.Path(files[-1])) if key not in given]
    return [arguments[0], *added, *own]


def flag_name(argument: str) -> str:
    """Returns the name of a flag; that of --nouse_dummy_data is use_dummy_data."""
    flag = argument.lstrip("-").split("=")[0]
    return flag[2:] if flag.startswith("no") and flag[2:] in OTHER_FLAGS else flag


def study_flags(path: pathlib.Path) -> list[tuple[str, str]]:
    """Returns names and flags of a study file; the config comes first, because its overrides need it."""
    entries = read_toml(path, f"--study={path}", "see profiling/sweeps/")
    known = (*FLAGS, *OTHER_FLAGS)
    for key in entries:
        if key not in known and not key.startswith("config."):
            raise UserError(f"--study={path}: {key} is not one of {', '.join(known)} or config.group.key")
    ordered = sorted(entries.items(), key=lambda entry: entry[0] != "config")
    return [(key, _flag(key, value)) for key, value in ordered]


def _flag(key: str, value: Any) -> str:
    if isinstance(value, bool) and not key.startswith("config."):
        return f"--{key}" if value else f"--no{key}"
    return f"--{key}={','.join(map(str, value)) if isinstance(value, list) else value}"
