"""What a study is: its runs, what its directory may hold, and the row that every run becomes.

`results.json` is written after every run. The same command goes on where it stopped: rows that are done stay, a run
that was cut off resumes from its own checkpoint. A run that fails, diverges, hangs or is killed is a row with its
reason, and the study goes on.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import write_json
from jepa_jax.config.schema import load_config_file

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
KILLED, TIMEOUT, INTERRUPTED = "killed", "timeout", "interrupted"
DONE = (FINISHED, DIVERGED)  # running these again would give the same
SUMMARY_KEYS = ("probe_accuracy", "untrained_probe_accuracy", "knn_accuracy", "wall_seconds", "cpu_seconds", "steps")

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of a study: a directory, the values that vary and the overrides that set them."""

    name: str
    values: Mapping[str, float]
    overrides: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Study:
    """What is common to all runs; two studies share a directory only if their `identity` is the same."""

    kind: str
    config: str
    output_dir: pathlib.Path
    command: tuple[str, ...]  # what starts a run, e.g. (sys.executable, "scripts/train.py")
    overrides: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        return {"study": self.kind, "config": self.config, "overrides": list(self.overrides), **self.fixed}


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Command line -> (what the study's own flags read, the --config.key=value for the runs)."""
    own, overrides = [], []
    for argument in arguments:
        if re.match(r"--?config\.", argument):
            if "=" not in argument:
                raise UserError(f"{argument}: no value; write {argument}=VALUE, with the equals sign")
            overrides.append("--" + argument.lstrip("-"))
        else:
            own.append(argument)
    return own, tuple(overrides)


def warmup_share(config: str, overrides: Sequence[str]) -> float | None:
    """Warm-up as a share of the config's epochs: a shorter run keeps the share, or it would be all warm-up.

    None where the user sets `optim.warmup_epochs`.
    """
    if any(override.startswith("--config.optim.warmup_epochs=") for override in overrides):
        return None
    optim = load_config_file(config).optim
    return optim.warmup_epochs / optim.epochs


def plan_runs(
    lrs: Sequence[float | None], epochs: Sequence[int], seeds: Sequence[int], warmup: float | None = None
) -> list[Run]:
    """Every combination; a learning rate of None leaves the config's own, so does a share of warm-up."""
    runs = []
    for count in epochs:
        for lr in lrs:
            for seed in seeds:
                values = ({} if lr is None else {"lr": lr}) | {"epochs": count, "seed": seed}
                overrides = [f"--config.optim.epochs={count}", f"--config.train.seed={seed}"]
                overrides += [] if lr is None else [f"--config.optim.lr={lr!r}"]
                overrides += [] if warmup is None else [f"--config.optim.warmup_epochs={round(warmup * count, 6)}"]
                runs.append(Run("_".join(f"{k}{v}" for k, v in values.items()), values, tuple(overrides)))
    return runs


def run_command(study: Study, run: Run) -> list[str]:
    """The command of one run; its own values come last and so win."""
    workdir = study.output_dir / run.name
    flags = [f"--config={study.config}", f"--workdir={workdir}", "--resume=auto"]
    return [*study.command, *flags, *study.overrides, *run.overrides]


def check(study: Study, runs: Sequence[Run], resume: bool = True) -> None:
    """Refuses, before anything runs, what every run would fail on."""
    if not pathlib.Path(study.config.split(":")[0]).is_file():
        raise UserError(f"--config = {study.config}: there is no such file; give a file of configs/")
    varied = {override.split("=")[0] for run in runs for override in run.overrides}
    for override in study.overrides:
        if override.split("=")[0] in varied:
            raise UserError(f"{override}: the study itself sets this key; leave it out, or use the study's own flag")
    if not resume and (study.output_dir / "results.json").exists():
        raise UserError(
            f"--output_dir = {study.output_dir}: holds a study already; use another, or leave out --noresume"
        )
    load_rows(study)


def make_row(run: Run, outcome: Row, workdir: pathlib.Path) -> Row:
    """The row of a run from how it ended and what it wrote."""
    row: Row = {"name": run.name, **run.values, **outcome, **dict.fromkeys(SUMMARY_KEYS), "final_loss": None}
    summary = read_json(workdir / "summary.json")
    if row["status"] == FINISHED and not summary:
        row |= {"status": FAILED, "reason": "exit code 0, but no readable summary.json was written"}
    elif row["status"] == FINISHED and summary.get("status", FINISHED) != FINISHED:
        row |= {"status": str(summary["status"]), "reason": f"summary.json says {summary['status']}"}
    if summary.get("status", FINISHED) == row["status"]:  # else it is of an earlier attempt
        row |= {key: finite(summary.get(key)) for key in SUMMARY_KEYS}
    if row["status"] == FINISHED:
        row["final_loss"] = finite(summary.get("final_loss", last_metric(workdir, "train/loss")))
    return row


def finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def last_metric(workdir: pathlib.Path, key: str) -> Any:
    """The last value of a metric in metrics.jsonl, from the end of the file."""
    try:
        with open(workdir / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.path.getsize(file.name) - 65536))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return json.loads(line)[key]
    return None


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object, empty if the file is absent or broken."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def save_rows(study: Study, rows: Iterable[Row]) -> None:
    write_json(study.output_dir / "results.json", {"header": study.identity(), "rows": list(rows)})


def load_rows(study: Study) -> dict[str, Row]:
    """Rows of an earlier call by name; a directory of another study is refused."""
    path = study.output_dir / "results.json"
    if not path.exists():
        return {}
    content = read_json(path)
    header, wanted = content.get("header"), study.identity()
    if not isinstance(header, dict) or not isinstance(content.get("rows"), list):
        raise UserError(f"{path}: not the results of a study; remove it or use another --output_dir")
    keys = [key for key in {**header, **wanted} if header.get(key) != wanted.get(key)]
    differ = [f"{key} {header.get(key)!r} there, {wanted.get(key)!r} here" for key in keys]
    if differ:
        raise UserError(f"--output_dir = {study.output_dir}: holds another study ({'; '.join(differ)}); use another")
    return {row["name"]: row for row in content["rows"]}
