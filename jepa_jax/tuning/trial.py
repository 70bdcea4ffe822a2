"""One trial of a sweep: a combination of settings, measured once, in a process of its own.

    python -m jepa_jax.tuning.trial REQUEST.json RESULT.json

is that process: it reads the request, measures (`measurement.py`) and writes the result. What it can explain itself
(a setting that is refused, memory that ran out, an exception) is a result too; of an end that it did not survive, the
process that started it says what it can (`trial_process.py`).
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from jepa_jax.base import processes
from jepa_jax.base.errors import EXIT_OK, UserError
from jepa_jax.base.files import write_json
from jepa_jax.runtime.memory import is_out_of_memory

OK, OUT_OF_MEMORY, CRASHED, TIMED_OUT, REFUSED = "ok", "out_of_memory", "crashed", "timed_out", "refused"
SKIPPED, PENDING = "skipped", "pending"  # of a row whose trial was not run, or not yet
# Steps that wait until they are complete, and for a share of their time after that.
WAITS = {"wait": 0.0, "slow": 0.10}
FAULTS = ("out_of_memory", "crash", "hang", *WAITS)  # that a self-test may ask for
# The knobs of a combination and the keys of a config that they set.
KNOBS = {
    "batch_size": "data.batch_size",
    "num_workers": "data.num_workers",
    "grad_accum_steps": "train.accum_steps",
    "precision": "train.precision",
    "remat": "train.remat",
    "pipeline": "data.pipeline",
}


@dataclasses.dataclass(frozen=True)
class Combination:
    """What a sweep varies; `batch_size` is the images of one optimizer step, which accumulation splits into parts."""

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

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Combination":
        return cls(**{name: values[name] for name in KNOBS})

    def apply(self, config: Any) -> Any:
        """A copy of a ConfigDict with these settings."""
        for name, key in KNOBS.items():
            config = with_key(config, key, getattr(self, name))
        return config


def with_key(config: Any, key: str, value: Any) -> Any:
    """A copy of a ConfigDict in which `key`, as in "data.batch_size", has another value."""
    changed = config.copy_and_resolve_references()
    group, last = key.split(".")
    changed[group][last] = value
    return changed


def combination_of(config: Any) -> Combination:
    """The settings that a config has by itself."""
    values = {}
    for name, key in KNOBS.items():
        group, last = key.split(".")
        values[name] = config[group][last]
    return Combination(**values)


@dataclasses.dataclass(frozen=True)
class TrialRequest:
    """What the process of a trial is told."""

    config: Mapping[str, Any]  # as given, nested; the combination is applied to it
    combination: Combination
    max_batches: int = 32  # measured
    warmup_batches: int = 4  # before that, after compiling
    use_dummy_data: bool = False  # images drawn by the loader's workers instead of the config's data
    gpu_index: int | None = None  # the only GPU that the process sees; None: all
    address_space_bytes: int | None = None  # for CPUs alone, as CUDA reserves more than there is memory
    fault: str = ""  # one of FAULTS: a self-test of whoever runs trials
    with_evaluation: bool = False  # a validation pass and a checkpoint before the measured steps

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrialRequest":
        return cls(**{**values, "combination": Combination.from_dict(values["combination"])})

    def configuration(self) -> Any:
        """The ConfigDict that is measured; lists of a request that was read from JSON become tuples again."""
        from ml_collections import ConfigDict

        return self.combination.apply(ConfigDict(_with_tuples(self.config)))


def _with_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_tuples(part) for name, part in value.items()}
    return tuple(_with_tuples(part) for part in value) if isinstance(value, list | tuple) else value


def attempt(request: TrialRequest) -> dict[str, Any]:
    """The result of a request in this process: status, reason and, if all went well, the figures."""
    from jepa_jax.tuning import address_space

    with address_space.limited(request.address_space_bytes):
        try:
            from jepa_jax.tuning.measurement import measure

            figures = measure(request, before_steps=lambda: inject(request.fault))
            return {"status": OK, "reason": "", **figures}
        except UserError as error:
            return {"status": REFUSED, "reason": str(error)}
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}".strip()
            status = OUT_OF_MEMORY if is_out_of_memory(text, is_limited(request)) else CRASHED
            return {"status": status, "reason": shortened(text)}


def is_limited(request: TrialRequest) -> bool:
    """Whether the address space of its process is: a thread that cannot start then means that memory ran out."""
    return request.address_space_bytes is not None or request.fault == OUT_OF_MEMORY


def inject(fault: str) -> None:
    """What a self-test asks for, where a real trial would meet it: the step is compiled and about to run."""
    if fault == "out_of_memory":
        from jepa_jax.tuning.address_space import run_out

        run_out()
    elif fault == "crash":
        os.abort()
    elif fault == "hang":
        while True:
            time.sleep(60)


def shortened(text: str, length: int = 300) -> str:
    """The first line of a message, cut to `length` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= length else line[: length - 3] + "..."


def main(arguments: list[str]) -> int:
    request_file, result_file = map(pathlib.Path, arguments)
    processes.end_with_parent()
    with contextlib.suppress(OSError):  # if the machine runs out of memory, the trial goes, not the one that asks
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    request = TrialRequest.from_dict(json.loads(request_file.read_text()))
    write_json(result_file, attempt(request))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
