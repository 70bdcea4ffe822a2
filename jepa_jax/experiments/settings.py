"""The settings that trials vary: combinations of them, grids from flags, and requests to measure a combination."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jepa_jax.base.errors import UserError
from jepa_jax.base.text import parse_numbers
from jepa_jax.config.groups import COMMON, Config
from jepa_jax.config.schema import entries, flatten


class Knob(NamedTuple):
    """A setting that a combination has a value of."""

    key: str  # of the config
    flag: str  # that lists values
    help: str  # of the flag
    word: str  # for tables


# By field of `Combination`, in the order of the grid: the last one changes fastest.
KNOBS = {
    "batch_size": Knob("data.batch_size", "batch_sizes", "images per optimizer step", "batch"),
    "num_workers": Knob("data.num_workers", "num_workers", "processes that load batches", "workers"),
    "grad_accum_steps": Knob("train.accum_steps", "grad_accum", "parts that a batch is computed in", "accumulation"),
    "precision": Knob("train.precision", "precisions", "bfloat16, float32 or both", "precision"),
    "remat": Knob("train.remat", "remats", "none, light, full or several of them", "remat"),
    "pipeline": Knob("data.pipeline", "pipelines", "grain, device or both", "pipeline"),
    "prefetch": Knob("data.prefetch", "prefetch", "batches kept ready on the device", "prefetch"),
    "worker_threads": Knob(
        "data.worker_threads", "worker_threads", "batches that each worker makes at once", "threads per worker"
    ),
}
FLAGS = {knob.flag: name for name, knob in KNOBS.items()}
LOADER_KNOBS = ("num_workers", "prefetch", "worker_threads")  # nothing else is fed by the loader's processes

KEYS = {name: entry.key for group, cls in COMMON.items() for name, entry in entries(cls, f"{group}.").items()}
USUAL_PREFETCH: int = KEYS["data.prefetch"].default  # labels name another one only
LATER_FLAGS = ("prefetch", "worker_threads")  # documents of sweeps without them say nothing of them


@dataclasses.dataclass(frozen=True)
class Combination:
    """A value of every knob; `batch_size` counts the images of one optimizer step, accumulation included.

    For a step of the user's own, which knows neither, remat and pipeline are "".
    """

    batch_size: int
    num_workers: int
    grad_accum_steps: int
    precision: str
    remat: str
    pipeline: str
    prefetch: int = USUAL_PREFETCH
    worker_threads: int = 1

    @property
    def label(self) -> str:
        parts = f"batch {self.batch_size}" + (f" in {self.grad_accum_steps}" if self.grad_accum_steps > 1 else "")
        workers = f"{self.num_workers} worker{'s' * (self.num_workers != 1)}"
        workers += f" of {self.worker_threads} threads" if self.worker_threads > 1 else ""
        remat = self.remat and f"remat {self.remat}"
        ahead = "" if self.prefetch == USUAL_PREFETCH else f"{self.prefetch} batches ahead"
        return ", ".join(filter(None, (parts, workers, self.precision, remat, self.pipeline, ahead)))

    @property
    def part_size(self) -> float:
        """Images that are computed at a time."""
        return self.batch_size / self.grad_accum_steps

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Combination":
        """Reads a JSON object; those of earlier versions lack the last settings."""
        return cls(**{name: values[name] for name in KNOBS if name in values})

    @classmethod
    def of(cls, config: Config) -> "Combination":
        """Returns the settings that a config has by itself."""
        flat = flatten(config)
        flat["data.num_workers"] = config.data.workers  # "auto" in numbers
        return cls(**{name: flat[knob.key] for name, knob in KNOBS.items()})

    def without_idle_workers(self) -> "Combination":
        """Returns the combination without idle workers (data on the device need none) and idle threads (of no worker).

        Combinations that differ in an idle loader alone run the same program from the same pipeline.
        """
        if self.pipeline == "device":
            return dataclasses.replace(self, num_workers=0, prefetch=USUAL_PREFETCH, worker_threads=1)
        return self if self.num_workers else dataclasses.replace(self, worker_threads=1)

    def as_overrides(self) -> dict[str, Any]:
        """Returns the settings by config key."""
        return {knob.key: getattr(self, name) for name, knob in KNOBS.items()}


@dataclasses.dataclass(frozen=True)
class TrialRequest:
    """What the process of a trial is asked to measure."""

    config: Mapping[str, Any]  # nested values of the config as given, to which the combination is applied; or {}
    combination: Combination
    max_batches: int = 32  # measured
    warmup_batches: int = 4  # before those, after compiling
    use_dummy_data: bool = False  # images are drawn by the loader's workers instead of read from the config's data
    gpu_index: int | None = None  # the only GPU that the process sees; None: all
    with_evaluation: bool = False  # a validation pass and a checkpoint before the measured steps
    memory_fraction: float | None = None  # of a GPU's memory that JAX takes, as training will; None: no GPU
    compile_anew: bool = False  # in every repeat: on a GPU XLA times kernels then, with other results each time
    make: str = ""  # "module:function" that makes a step of the user's own, without a config; see measurement.py

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return values if self.make else {name: value for name, value in values.items() if name != "make"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrialRequest":
        return cls(**{**values, "combination": Combination.from_dict(values["combination"])})

    def configuration(self) -> Config:
        """Returns the config that is measured; raises UserError if the settings do not go together."""
        from jepa_jax.config.resolve import resolve
        from jepa_jax.program.config import changed_config  # imports jax

        return changed_config(resolve(self.config), self.combination.as_overrides())


def grid_values(config: Config, texts: Mapping[str, str | None]) -> dict[str, list[Any]]:
    """Returns the values of each flag in FLAGS from its text; a flag without text has the config's own value.

    Batch sizes are sorted, so that the smallest one that does not fit is met first and the larger ones are skipped.
    """
    own = Combination.of(config)
    values: dict[str, list[Any]] = {}
    for flag, knob in FLAGS.items():
        text, key = texts.get(flag), KEYS[KNOBS[knob].key]
        if text is None:
            values[flag] = [getattr(own, knob)]
        elif key.kind is int:
            values[flag] = parse_numbers(flag, text, int, max(0, key.least or 0))
        else:
            values[flag] = list(dict.fromkeys(part.strip() for part in text.split(",")))
            for part in values[flag]:
                if part not in key.choices:
                    raise UserError(f"--{flag} = {text}: {part!r} is not one of {', '.join(key.choices)}")
    values["batch_sizes"].sort()
    return values


def all_combinations(values: Mapping[str, Sequence[Any]]) -> list[Combination]:
    """Returns every combination of the values of each flag in FLAGS; of those that differ in idle workers, one."""
    product = itertools.product(*(values[flag] for flag in FLAGS))
    found = [Combination(**dict(zip(FLAGS.values(), values, strict=True))) for values in product]
    return list(dict.fromkeys(combination.without_idle_workers() for combination in found))
