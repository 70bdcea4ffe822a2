"""The row that a training run of a study becomes, from how its process ended and what it wrote."""

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from jepa_jax.base import processes
from jepa_jax.base.errors import EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, EXIT_USER_ERROR
from jepa_jax.base.files import read_json_or_empty

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
KILLED, TIMEOUT, INTERRUPTED = "killed", "timeout", "interrupted"
DONE = (FINISHED, DIVERGED)  # running these again would give the same result
# Keys of summary.json that a row repeats.
SUMMARY_KEYS = (
    "probe_held_out_accuracy", "untrained_probe_held_out_accuracy", "probe_accuracy", "untrained_probe_accuracy",
    "knn_accuracy", "wall_seconds", "cpu_seconds", "steps",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StudyRow:
    """One run of a study: the values it was given, how it ended, and its results (None where there are none).

    `attempt_seconds` is the time of the last of `attempts`. Fields are named as in results.json.
    """

    name: str
    lr: float | None  # None where the study keeps the learning rate of the config
    epochs: int
    seed: int
    status: str
    reason: str = ""
    exit_code: int | None = None
    attempts: int = 0
    attempt_seconds: float = 0.0
    probe_held_out_accuracy: float | None = None  # None in rows of earlier versions
    untrained_probe_held_out_accuracy: float | None = None
    probe_accuracy: float | None = None  # on the test split: nothing is chosen by it
    untrained_probe_accuracy: float | None = None
    knn_accuracy: float | None = None
    wall_seconds: float | None = None
    cpu_seconds: float | None = None
    steps: int | None = None
    final_loss: float | None = None

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return values if self.lr is not None else {key: value for key, value in values.items() if key != "lr"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StudyRow":
        fields = [field.name for field in dataclasses.fields(cls)]
        return cls(**{"lr": None, **{key: value for key, value in values.items() if key in fields}})


def explain_exit(ended: processes.Ended, timeout: float | None) -> tuple[str, str]:
    """Returns the status and the reason of a training run from how its process ended."""
    code, message = ended.exit_code, ended.message
    if ended.timed_out:
        return TIMEOUT, f"stopped after {timeout:g} s (--timeout)"
    if code == EXIT_OK:
        return FINISHED, ""
    if code == EXIT_DIVERGED:
        return DIVERGED, message or "the loss became NaN or infinite"
    if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        return INTERRUPTED, f"interrupted from outside (exit code {code}); the same command continues it"
    if code < 0:
        name = processes.signal_name(code)
        return KILLED, f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    if code == EXIT_USER_ERROR:
        return FAILED, message or "user error (exit code 2), see log.txt"
    return FAILED, f"exit code {code}: {message or 'see log.txt'}"


def with_results(row: StudyRow, workdir: pathlib.Path) -> StudyRow:
    """Returns the row with the results that its run wrote, or with the reason why there are none."""
    summary = read_json_or_empty(workdir / "summary.json")
    status, reason = row.status, row.reason
    if status == FINISHED and not summary:
        status, reason = FAILED, "exit code 0, but no readable summary.json was written"
    elif status == FINISHED and summary.get("status", FINISHED) != FINISHED:
        status, reason = str(summary["status"]), f"summary.json says {summary['status']}"
    results: dict[str, Any] = {}
    if summary.get("status", FINISHED) == status:  # otherwise the summary is that of an earlier attempt
        results = {key: finite(summary.get(key)) for key in SUMMARY_KEYS}
    if status == FINISHED:
        results["final_loss"] = finite(summary.get("final_loss", last_metric(workdir, "train/loss")))
    return dataclasses.replace(row, status=status, reason=reason, **results)


def finite(value: Any) -> Any:
    """Returns a finite number as it is and None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def reached_epoch(workdir: pathlib.Path, most: float) -> float:
    """Returns the epoch that a run has reached, at most `most`."""
    return min(finite(last_metric(workdir, "epoch")) or 0.0, most)


def last_metric(workdir: pathlib.Path, key: str) -> Any:
    """Returns the last value of a metric in metrics.jsonl, read from the end of the file."""
    with contextlib.suppress(OSError):
        for line in reversed(processes.tail(workdir / "metrics.jsonl", size=65536).splitlines()):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return json.loads(line)[key]
    return None
