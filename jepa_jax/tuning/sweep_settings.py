"""What a throughput sweep is asked for: flags become a grid of combinations; a study file holds flags as data."""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_toml
from jepa_jax.base.text import parse_numbers
from jepa_jax.config.schema import COMMON
from jepa_jax.tuning.trial import FAULTS, KNOBS, Combination, TrialRequest, combination_of

# The flag of each knob, in the order of the grid: the last one changes fastest.
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
    "address_space_gb", "fixed_effective_batch", "inject_faults", "output_json",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Everything that decides what is measured, and where it is written."""

    config: Any  # a ConfigDict, as given
    config_name: str
    values: Mapping[str, Sequence[Any]]  # by flag, see FLAGS
    output: pathlib.Path
    max_batches: int = 32
    warmup_batches: int = 4
    repeats: int = 3
    use_dummy_data: bool = False
    gpu_index: int | None = None
    address_space_gb: float | None = None
    faults: Mapping[int, str] = dataclasses.field(default_factory=dict)  # number of the trial, from 0 -> fault

    @property
    def combinations(self) -> list[Combination]:
        grid = itertools.product(*(self.values[flag] for flag in FLAGS))
        return [Combination(**dict(zip(FLAGS.values(), values, strict=True))) for values in grid]

    @property
    def folder(self) -> pathlib.Path:
        """Of the trials' requests, results and logs."""
        return self.output.with_name(f"{self.output.stem}_trials")

    def request(self, index: int) -> TrialRequest:
        """For trial number `index`."""
        return TrialRequest(
            config=self.config.to_dict(),
            combination=self.combinations[index],
            max_batches=self.max_batches,
            warmup_batches=self.warmup_batches,
            use_dummy_data=self.use_dummy_data,
            gpu_index=self.gpu_index,
            address_space_bytes=None if self.address_space_gb is None else round(self.address_space_gb * 2**30),
            fault=self.faults.get(index, ""),
        )

    def settings(self) -> dict[str, Any]:
        """By flag, what must be the same for a sweep to go on."""
        return {
            **{flag: list(values) for flag, values in self.values.items()},
            "max_batches": self.max_batches,
            "warmup_batches": self.warmup_batches,
            "repeats": self.repeats,
            "use_dummy_data": self.use_dummy_data,
            "gpu_index": self.gpu_index,
            "address_space_gb": self.address_space_gb,
            "inject_faults": ",".join(f"{index}:{fault}" for index, fault in sorted(self.faults.items())),
        }


def grid_values(config: Any, texts: Mapping[str, str | None]) -> dict[str, list[Any]]:
    """Values of each flag of FLAGS from its text; a flag that is not given has the config's own value.

    Batches are sorted: of those that are too large, the smallest is met first and tells of the others.
    """
    own = combination_of(config)
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
    """'a,b' -> ['a', 'b'], in the given order, without repeats."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for part in found:
        if part not in choices:
            raise UserError(f"--{flag} = {text}: {part!r} is not one of {', '.join(choices)}")
    return found


def parse_faults(text: str, trials: int) -> dict[int, str]:
    """'3:out_of_memory,5:crash' -> {3: 'out_of_memory', 5: 'crash'}."""
    faults: dict[int, str] = {}
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"\s*(\d+):(\w+)\s*", part)
        if not found or found[2] not in FAULTS:
            raise UserError(
                f"--inject_faults = {text}: {part!r} is not TRIAL:FAULT with a fault of {', '.join(FAULTS)}"
            )
        if int(found[1]) >= trials:
            raise UserError(f"--inject_faults = {text}: there are {trials} trials, numbered from 0")
        faults[int(found[1])] = found[2]
    return faults


def with_study(arguments: Sequence[str]) -> list[str]:
    """A command line in which --study=FILE is replaced by the flags of that file; those on the command line win.

    `--study FILE`, in two words, is the same.
    """
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
    given = {name(argument) for argument in own}
    added = [flag for key, flag in study_flags(pathlib.Path(files[-1])) if key not in given]
    return [arguments[0], *added, *own]


def name(argument: str) -> str:
    """Of a flag: --nouse_dummy_data is use_dummy_data."""
    flag = argument.lstrip("-").split("=")[0]
    return flag[2:] if flag.startswith("no") and flag[2:] in OTHER_FLAGS else flag


def study_flags(path: pathlib.Path) -> list[tuple[str, str]]:
    """Names and flags of a study file; the config comes first, as its overrides need it."""
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
