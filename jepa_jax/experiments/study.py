"""Studies: many training runs that differ in learning rate, epochs or seed, one process after the other.

`results.json` is written after every run. The same command continues a study: finished rows stay, and a run that was
interrupted resumes from its own checkpoint. A run that fails, diverges, hangs or is killed becomes a row with its
reason, and the study continues.
"""

import contextlib
import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jepa_jax.base import processes
from jepa_jax.base.errors import EXIT_OK, UserError
from jepa_jax.base.files import read_json_or_empty
from jepa_jax.base.selection import SELECTION_KEY, VALIDATION_LOSS
from jepa_jax.base.text import duration, number, percent, short
from jepa_jax.config.flags import parse_config
from jepa_jax.data.facts import data_facts
from jepa_jax.experiments.engine import EXIT_NO_RESULT, Experiment, Header, TaskProgress, explain_exit
from jepa_jax.experiments.findings import LOSS, selection_of
from jepa_jax.experiments.rows import (
    DONE,
    FAILED,
    FINISHED,
    INTERRUPTED,
    KILLED,
    OUT_OF_MEMORY,
    TIMED_OUT,
    TIMEOUT,
    StudyRow,
)
from jepa_jax.methods.contract import build_method
from jepa_jax.program.config import load_config

RUN_GRACE_SECONDS = 120.0  # for a run to end its step (or its compilation) and to write a checkpoint
# Keys of summary.json that a row repeats.
SUMMARY_KEYS = (
    "probe_held_out_accuracy", "untrained_probe_held_out_accuracy", "probe_accuracy", "untrained_probe_accuracy",
    "knn_accuracy", "validation_loss", "wall_seconds", "cpu_seconds", "steps",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Study:
    """What all runs have in common; a directory is shared only by studies with the same `identity`."""

    kind: str
    config: str
    output_dir: pathlib.Path
    command: tuple[str, ...]  # starts a run, for example (sys.executable, "-m", "jepa_jax", "train")
    overrides: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    warmup_share: float | None = None  # of the epochs of a run; None: warm-up is as long as in the config

    def identity(self) -> dict[str, Any]:
        return {"study": self.kind, "config": self.config, "overrides": list(self.overrides), **self.fixed}

    @property
    def experiment(self) -> Experiment:
        place = self.output_dir
        return Experiment("study", "--output_dir", place, results=place / "results.json", folder=place)

    def run_overrides(self, run: StudyRow) -> list[str]:
        overrides = [f"--config.optim.epochs={run.epochs}", f"--config.train.seed={run.seed}"]
        if run.lr is not None:
            overrides.append(f"--config.optim.lr={run.lr!r}")
        if self.warmup_share is not None:
            overrides.append(f"--config.optim.warmup_epochs={round(self.warmup_share * run.epochs, 6)}")
        return overrides

    def run_command(self, run: StudyRow) -> list[str]:
        """Returns the command of one run; its own values come last, so that they win."""
        flags = [f"--config={self.config}", f"--workdir={self.output_dir / run.name}", "--resume=auto"]
        return [*self.command, *flags, *self.overrides, *self.run_overrides(run)]


def warmup_share(config: str, overrides: Sequence[str]) -> float | None:
    """Returns warm-up as a share of the config's epochs, which shorter runs keep, or they would be all warm-up.

    None where the user sets `optim.warmup_epochs`.
    """
    if any(override.startswith("--config.optim.warmup_epochs=") for override in overrides):
        return None
    optim = load_config(config).optim
    return optim.warmup_epochs / optim.epochs


def plan_runs(lrs: Sequence[float | None], epochs: Sequence[int], seeds: Sequence[int]) -> list[StudyRow]:
    """Returns a pending row for every combination; a rate of None stays that of the config."""
    return [
        StudyRow(("" if lr is None else f"lr{lr}_") + f"epochs{count}_seed{seed}", lr, count, seed)
        for count, lr, seed in itertools.product(epochs, lrs, seeds)
    ]


def check(study: Study, runs: Sequence[StudyRow], resume: bool = True) -> None:
    """Rejects, before anything runs, what would make every run fail."""
    varied = {override.split("=")[0] for run in runs for override in study.run_overrides(run)}
    for override in study.overrides:
        if override.split("=")[0] in varied:
            raise UserError(f"{override}: the study itself sets this key; leave it out, or use the study's own flag")
    load_rows(study, resume)
    # Runs are compared by their linear probe on held-out train images, or else by the loss of what is held out.
    config = load_config(parse_config(study.config, study.overrides))
    evaluators = build_method(config, total_steps=1).evaluators
    if any(":" in name for name in evaluators) or config.data.validation:
        return  # evaluators of the user's own may measure it
    fix = f"studies compare runs by {SELECTION_KEY} or {VALIDATION_LOSS}; hold something out: data.validation=0.1"
    if "classification" not in evaluators:
        raise UserError(f"config.method.name = {config.method.name!r}: has no linear probe, and {fix}")
    if data_facts(config.data, assume=True).num_classes < 2:
        raise UserError(f"config.data.source = {config.data.source!r}: has no labels that differ, and {fix}")


def load_rows(study: Study, resume: bool = True) -> list[StudyRow]:
    """Returns the rows of earlier calls; rejects a directory that holds another study."""

    def differences(there: Header, here: Header) -> list[str]:
        keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
        return [f"{key}: {there.get(key)} -> {here.get(key)}" for key in keys]

    def parse(document: dict[str, Any]) -> list[StudyRow]:
        return [StudyRow.from_dict(row) for row in document["rows"]]

    return study.experiment.load(study.identity(), parse, differences, resume=resume) or []


def save_rows(study: Study, rows: Iterable[StudyRow]) -> None:
    study.experiment.save({"header": study.identity(), "rows": [row.to_dict() for row in rows]})


def run_study(
    study: Study,
    runs: Sequence[StudyRow],
    *,
    timeout: float | None = None,
    resume: bool = True,
    grace: float = RUN_GRACE_SECONDS,
    on_rows: Callable[[list[StudyRow]], None] = lambda rows: None,
) -> tuple[int, list[StudyRow]]:
    """Runs what is not done yet; returns the exit code and all rows of the directory.

    `timeout` holds for one attempt of one run; `on_rows` is called with all rows after each run.
    """
    check(study, runs, resume)
    progress = TaskProgress(sum(run.epochs for run in runs), "epochs")

    def run_all() -> None:
        rows = {row.name: row for row in load_rows(study)}
        save_rows(study, rows.values())  # writes the header, so that a study killed in its first run is recognised
        for run in runs:
            known = rows.get(run.name, run)
            if known.status in DONE:
                progress.done += run.epochs
                continue
            began = time.monotonic()
            row = dataclasses.replace(run, status=INTERRUPTED, reason="the study was interrupted")
            try:
                row = _attempt(study, row, progress, timeout, grace)
            finally:
                seconds = round(time.monotonic() - began, 3)
                row = dataclasses.replace(row, attempts=known.attempts + 1, attempt_seconds=seconds)
                rows[run.name] = with_results(row, study.output_dir / run.name)
                save_rows(study, rows.values())
                on_rows(list(rows.values()))
            progress.done += run.epochs
            _report(rows[run.name], rows.values(), progress)

    code = study.experiment.execute(run_all, progress, grace=grace)
    rows = load_rows(study)
    if code == EXIT_OK and not any(row.status == FINISHED for row in rows):
        code = EXIT_NO_RESULT
    return code, rows


def _attempt(study: Study, row: StudyRow, progress: TaskProgress, timeout: float | None, grace: float) -> StudyRow:
    """Runs one attempt in its own process, unless the run had finished when the study was killed."""
    workdir = study.output_dir / row.name
    if read_json_or_empty(workdir / "summary.json").get("status") == FINISHED:
        return dataclasses.replace(row, status=FINISHED, reason="", exit_code=EXIT_OK)

    def tick() -> None:
        progress.tick(row.name, reached_epoch(workdir, row.epochs))

    ended = processes.run(study.run_command(row), workdir, timeout=timeout, grace=grace, on_tick=tick)
    status, reason = explain_exit(ended, timeout, "--timeout")
    if status in (OUT_OF_MEMORY, FAILED):
        status = KILLED if ended.exit_code < 0 else FAILED
    elif status == TIMED_OUT:
        status = TIMEOUT
    return dataclasses.replace(row, status=status, reason=reason, exit_code=ended.exit_code)


def with_results(row: StudyRow, workdir: pathlib.Path) -> StudyRow:
    """Returns the row with the results that its run wrote, or with the reason why there are none."""
    summary = read_json_or_empty(workdir / "summary.json")
    if row.status == FINISHED and not summary:
        return dataclasses.replace(row, status=FAILED, reason="exit code 0, but no readable summary.json was written")
    if summary.get("status") != row.status:  # the summary is that of an earlier attempt
        return row
    results = {key: finite(summary.get(key)) for key in SUMMARY_KEYS}
    if row.status == FINISHED:
        results["final_loss"] = finite(last_metric(workdir, "train/loss"))
    return dataclasses.replace(row, **results)


def finite(value: Any) -> Any:
    """Returns a finite number as it is and None for anything else."""
    return value if number(value) is not None and not isinstance(value, str) else None


def reached_epoch(workdir: pathlib.Path, most: float) -> float:
    return min(finite(last_metric(workdir, "epoch")) or 0.0, most)


def last_metric(workdir: pathlib.Path, key: str) -> Any:
    """Returns the last value of a metric in metrics.jsonl, read from the end of the file."""
    with contextlib.suppress(OSError):
        for line in reversed(processes.tail(workdir / "metrics.jsonl", size=65536).splitlines()):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return json.loads(line)[key]
    return None


def _report(row: StudyRow, rows: Iterable[StudyRow], progress: TaskProgress) -> None:
    finished = [r for r in rows if r.status == FINISHED]
    chosen_by = selection_of(finished)
    if measured := [(getattr(r, chosen_by.key), r.name) for r in finished if getattr(r, chosen_by.key) is not None]:
        value, name = max(measured, key=lambda one: chosen_by.sign * one[0])
        progress.best = f"best {chosen_by.form.format(value)} ({name})"
    figures = f"{percent(row.probe_held_out_accuracy)} held-out, {percent(row.probe_accuracy)} test"
    if chosen_by is LOSS:
        figures = f"validation loss {short(row.validation_loss)}"
    detail = f"{figures if row.status == FINISHED else row.reason}, {duration(row.attempt_seconds)}"
    progress.report(row.name, row.status, detail)
