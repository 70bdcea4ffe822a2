"""The throughput sweep: every combination of a grid measured in processes of their own, one after the other.

Rounds are interleaved: each combination once, then each again, starting elsewhere. What slows a machine down for a
while then falls on all of them. The results are on disk after each repeat; the same command with --resume goes on.
"""

import json
import pathlib
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jepa_jax.base import processes
from jepa_jax.base.console import ProgressBar
from jepa_jax.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, UserError
from jepa_jax.base.files import write_atomically, write_json
from jepa_jax.base.text import duration, short
from jepa_jax.data.sources import open_source
from jepa_jax.runtime.provenance import base_header, describe_hardware, differences
from jepa_jax.tuning.sweep_rows import (
    Row,
    is_open,
    new_row,
    skip_larger,
    with_compile_seconds,
    with_repeat,
    without_failures,
)
from jepa_jax.tuning.sweep_settings import Sweep
from jepa_jax.tuning.trial import OK, Combination
from jepa_jax.tuning.trial_process import CACHE, STOP_SECONDS, finished_result, run_trial

EXIT_NONE_MEASURED = 1  # every combination has a row, none of them a figure

Document = dict[str, Any]  # "header", "rows", "conclusion"; see docs/reference/sweep.schema.json
OnRepeat = Callable[[int, Document], None]  # hears which row has a new repeat


def conduct(
    sweep: Sweep,
    *,
    time_limit: float,
    resume: bool,
    retry_failed: bool = False,
    fixed_effective_batch: int | None = None,
) -> tuple[int, dict[str, Any], str]:
    """Runs a sweep with a progress bar on stderr: (exit code, result as an object, table and conclusion as text)."""
    batches = sweep.values["batch_sizes"]
    if fixed_effective_batch is not None and fixed_effective_batch not in batches:
        raise UserError(
            f"--fixed_effective_batch = {fixed_effective_batch}: not among --batch_sizes = "
            f"{','.join(map(str, batches))}; a batch size counts all images of an optimizer step, "
            "accumulation included: add it there"
        )
    document = open_document(sweep, resume or retry_failed)
    if retry_failed:
        document["rows"] = [without_failures(row) for row in document["rows"]]
    if not sweep.use_dummy_data and any(open_trials(document["rows"], sweep.repeats)):
        open_source(sweep.config.data, "train")  # data that is not there is said once, not by every trial
    code = EXIT_OK
    try:
        with processes.sigterm_raises(), Progress(document, sweep.repeats) as progress:
            execute(sweep, document, time_limit=time_limit, on_tick=progress.tick, on_repeat=progress.repeat)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except processes.Terminated:
        code = EXIT_TERMINATED
    table = conclude(sweep, document, fixed_effective_batch)
    rows, conclusion = document["rows"], document["conclusion"]
    if code == EXIT_OK and not any(row["status"] == OK for row in rows):
        code = EXIT_NONE_MEASURED
    if not list(open_trials(rows, sweep.repeats)):
        shutil.rmtree(sweep.folder / CACHE, ignore_errors=True)  # nothing is left to compile
    statuses = [row["status"] for row in rows]
    result = {
        "trials": len(rows),
        **{status: statuses.count(status) for status in dict.fromkeys(statuses)},
        "best": conclusion["best"],
        "samples_per_sec": conclusion.get("samples_per_sec"),
        "output_json": str(sweep.output),
        "html": str(sweep.output.with_suffix(".html")),
        "exit_code": code,
    }
    return code, result, "\n".join([table, "", *conclusion["text"]])


def execute(
    sweep: Sweep,
    document: Document,
    *,
    time_limit: float,
    on_tick: Callable[[int], None] = lambda index: None,
    on_repeat: OnRepeat = lambda index, document: None,
) -> None:
    """Measures what the document does not have yet and writes it after each repeat."""
    sweep.folder.mkdir(parents=True, exist_ok=True)
    refusal = f"--output_json = {sweep.output}: another sweep is writing it; wait for it or use another file"
    with processes.only_one(sweep.folder / ".lock", refusal):
        for left in sweep.folder.glob(f"*/{processes.PROCESS_FILE}"):  # of a sweep that was killed
            processes.stop_left_over(left.parent, STOP_SECONDS)
        if not sweep.output.exists():
            for left in filter(pathlib.Path.is_dir, sweep.folder.iterdir()):  # of results that were removed
                shutil.rmtree(left)
        write_json(sweep.output, document)
        # Looked at one by one: a trial that runs out of memory takes others off the list.
        for index, number in open_trials(document["rows"], sweep.repeats):
            rows = document["rows"]
            measurement = measured_or_run(sweep, index, number, time_limit, on_tick)
            rows[index] = with_repeat(rows[index], number, measurement)
            if index not in sweep.faults:  # an injected fault says nothing of other trials
                rows[:] = skip_larger(rows, index)
            rows[:] = with_compile_seconds(rows)
            write_json(sweep.output, document)
            on_repeat(index, document)


def open_trials(rows: Sequence[Row], repeats: int) -> Iterator[tuple[int, int]]:
    """(row, round) of the repeats that are to be measured, as `rows` stands when each is asked for."""
    for number in range(repeats):
        for index in interleaved(len(rows), number, repeats):
            if is_open(rows[index], repeats) and len(rows[index]["repeats"]) <= number:
                yield index, number


def interleaved(count: int, number: int, rounds: int) -> list[int]:
    """The order of round `number`: each round starts elsewhere, so that none of them always follows the same start."""
    start = number * count // rounds
    return [(start + i) % count for i in range(count)]


def measured_or_run(
    sweep: Sweep, index: int, number: int, time_limit: float, on_tick: Callable[[int], None]
) -> dict[str, Any]:
    """One repeat; if it came to a good end after its sweep was killed, what it left.

    One that failed then may have been ended with its sweep: it is run again.
    """
    name, request = f"{index:03d}_round{number}", sweep.request(index)
    left = finished_result(sweep.folder / name, request)
    if left is not None and left["status"] == OK:
        return {**left, "trial_seconds": None}
    began = time.monotonic()
    measurement = run_trial(
        request, sweep.folder, time_limit=time_limit, limit_flag="--time_limit", name=name,
        on_tick=lambda: on_tick(index),
    )  # fmt: skip
    return {**measurement, "trial_seconds": round(time.monotonic() - began, 3)}


def open_document(sweep: Sweep, resume: bool) -> Document:
    """A new document, or the one to go on with; refuses to write over results."""
    rows = [new_row(combination) for combination in sweep.combinations]
    document: Document = {"header": make_header(sweep), "rows": rows, "conclusion": None}
    if not sweep.output.exists():
        try:
            sweep.output.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output_json = {sweep.output}: cannot make its folder ({error.strerror})") from error
        return document
    if not resume:
        raise UserError(
            f"--output_json = {sweep.output}: exists already; --resume goes on with it, another name starts anew"
        )
    try:
        found = json.loads(sweep.output.read_text())
        differ = differences(found["header"], document["header"])
        document |= {"header": found["header"], "rows": list(found["rows"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"--output_json = {sweep.output}: not the results of a sweep; use another name") from None
    if differ:
        raise UserError(
            f"--output_json = {sweep.output}: holds a sweep with other settings ({'; '.join(differ)}); "
            "give the same ones to --resume, or use another name"
        )
    return document


def conclude(sweep: Sweep, document: Document, fixed_effective_batch: int | None) -> str:
    """Writes the conclusion, the page and the table beside the results; returns the table."""
    from jepa_jax.reports import sweep_page
    from jepa_jax.reports.page import write_page
    from jepa_jax.tuning import choice

    document["conclusion"] = choice.conclude(
        document["rows"],
        config=document["header"]["config"],
        fixed_effective_batch=fixed_effective_batch,
    )
    write_json(sweep.output, document)
    write_page(sweep.output.with_suffix(".html"), sweep_page.sweep_page(document))
    table = sweep_page.sweep_markdown(document["rows"]).strip()
    write_atomically(sweep.output.with_suffix(".md"), table + "\n")
    return table


def make_header(sweep: Sweep) -> dict[str, Any]:
    hardware = describe_hardware(sweep.gpu_index)
    if sweep.address_space_gb is not None and hardware["gpu_name"]:
        raise UserError(
            f"--address_space_gb = {sweep.address_space_gb:g}: there is a {hardware['gpu_name']}, and CUDA reserves "
            "more address space than there is memory; leave the flag out, or set JAX_PLATFORMS=cpu"
        )
    return {
        **base_header(sweep.config, sweep.config_name, hardware),
        "max_batches": sweep.max_batches,
        "warmup_batches": sweep.warmup_batches,
        "repeats": sweep.repeats,
        "memory_limit_bytes": hardware["gpu_memory_bytes"],
        "settings": sweep.settings(),
    }


class Progress(ProgressBar):
    """A bar in repeats, with the time left and the best so far; a line on stderr for every repeat."""

    def __init__(self, document: Document, repeats: int):
        self.document, self.repeats = document, repeats
        self.total = len(document["rows"]) * repeats
        super().__init__(self.total)

    def tick(self, index: int) -> None:
        label = Combination.from_dict(self.document["rows"][index]["combination"]).label
        self.show(self.done(), label, f"{self.done()} of {self.total}", self.time_left(), self.best())

    def repeat(self, index: int, document: Document) -> None:
        row = document["rows"][index]
        last = row["repeats"][-1]
        figures = f"{short(last.get('samples_per_sec'))} images/s" if last["status"] == OK else last["reason"]
        label = Combination.from_dict(row["combination"]).label
        left = [] if sys.stderr.isatty() else list(filter(None, [self.time_left()]))  # else the bar says it
        self.line(" · ".join([f"{self.done()}/{self.total}", label, last["status"], figures, *left]))

    def done(self) -> int:
        return self.total - len(list(open_trials(self.document["rows"], self.repeats)))

    def time_left(self) -> str:
        """By what repeats have taken so far."""
        seconds = [repeat.get("trial_seconds") for row in self.document["rows"] for repeat in row["repeats"]]
        known = [value for value in seconds if value is not None]
        return f"{duration(statistics.median(known) * (self.total - self.done()))} left" if known else ""

    def best(self) -> str:
        measured = [row for row in self.document["rows"] if row["status"] == OK]
        if not measured:
            return ""
        row = max(measured, key=lambda row: row["samples_per_sec"])
        return f"best {short(row['samples_per_sec'])} images/s ({Combination.from_dict(row['combination']).label})"
