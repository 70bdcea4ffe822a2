"""The throughput sweep: measures every combination of a grid, one process after the other, or one on each of many GPUs.

Rounds are interleaved: each combination once, then each again, starting elsewhere, so that what slows a machine down
for a while affects all of them. The results are on disk after each repeat; the same command with --resume continues.
"""

import dataclasses
import pathlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import EXIT_OK, UserError
from jepa_jax.base.runner import EXIT_NO_RESULT, Experiment, Progress, Runner, Task
from jepa_jax.base.text import short
from jepa_jax.config.groups import Config
from jepa_jax.data.sources import open_source
from jepa_jax.experiments.card_pool import run_on_cards
from jepa_jax.experiments.recommendation import recommend
from jepa_jax.experiments.rows import OK, SweepRow, TrialResult, rows_to_json, skip_larger
from jepa_jax.experiments.settings import Combination, TrialRequest, grid
from jepa_jax.experiments.trial_process import CACHE, STOP_SECONDS, finished_result, run_trial
from jepa_jax.runtime.provenance import base_header, describe_hardware, differences

OPTIONS = ("use_dummy_data", "gpu_index", "memory_fraction")  # of a request
Document = dict[str, Any]  # "header", "rows", "conclusion"; see docs/reference/sweep.schema.json


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Everything that decides what is measured, and where it is written."""

    config: Config  # as given
    config_name: str
    values: Mapping[str, Sequence[Any]]  # by flag, see FLAGS
    output: pathlib.Path
    max_batches: int = 32
    warmup_batches: int = 4
    repeats: int = 3
    use_dummy_data: bool = False
    gpu_index: int | None = None
    memory_fraction: float | None = None  # of a GPU's memory that JAX takes; None: no GPU
    compile_anew: bool = False  # in every repeat
    gpus: tuple[int, ...] | None = None  # on which trials run at once, one on each; None: one after the other

    @property
    def experiment(self) -> Experiment:
        folder = self.output.with_name(f"{self.output.stem}_trials")
        return Experiment("sweep", "--output_json", self.output, results=self.output, folder=folder)

    def request(self, combination: Combination) -> TrialRequest:
        names = ("max_batches", "warmup_batches", "compile_anew", *OPTIONS)
        return TrialRequest(self.config.to_dict(), combination, **{name: getattr(self, name) for name in names})

    def header(self) -> dict[str, Any]:
        """Returns the header of a new document; its settings must be the same for a sweep to continue."""
        hardware = describe_hardware(self.gpus[0] if self.gpus else self.gpu_index)
        counts = {name: getattr(self, name) for name in ("max_batches", "warmup_batches", "repeats")}
        lists = {flag: list(values) for flag, values in self.values.items()}
        return {
            **base_header(self.config, self.config_name, hardware),
            **counts,
            "memory_limit_bytes": hardware["gpu_memory_bytes"],
            "settings": lists | counts | {name: getattr(self, name) for name in (*OPTIONS, "gpus")},
        }


def run_sweep(
    sweep: Sweep,
    *,
    time_limit: float,
    resume: bool,
    retry_failed: bool = False,
    fixed_batch: int | None = None,
) -> tuple[int, Document]:
    """Measures what is not measured yet; returns the exit code and the document, which is also on disk.

    Args:
      time_limit: seconds after which a trial is killed.
      resume: continue the results that exist; otherwise they are an error.
      retry_failed: continue, and measure again what failed or was skipped.
      fixed_batch: recommend a combination of this batch size.
    """
    batches = sweep.values["batch_sizes"]
    if fixed_batch is not None and fixed_batch not in batches:
        raise UserError(
            f"--fixed_effective_batch = {fixed_batch}: not among --batch_sizes = {','.join(map(str, batches))}; "
            "a batch size counts all images of an optimizer step, accumulation included: add it there"
        )
    header, rows = load_document(sweep, resume or retry_failed)
    if retry_failed:
        rows = [row.without_failures() for row in rows]
    if not sweep.use_dummy_data and any(open_trials(rows, sweep.repeats)):
        open_source(sweep.config.data, "train")  # reports missing data once, instead of in every trial
    seconds = [repeat.trial_seconds for row in rows for repeat in row.repeats]
    progress = Progress(len(rows) * sweep.repeats, "repeats", [value for value in seconds if value is not None])
    code = sweep.experiment.execute(
        lambda runner: _measure_rows(runner, progress, sweep, header, rows, time_limit), progress, grace=STOP_SECONDS
    )
    if code == EXIT_OK and not any(row.status == OK for row in rows):
        code = EXIT_NO_RESULT
    if not any(open_trials(rows, sweep.repeats)):
        shutil.rmtree(sweep.experiment.folder / CACHE, ignore_errors=True)  # nothing is left to compile
    document = make_document(header, rows)
    document["conclusion"] = recommend(rows, config=sweep.config, fixed_batch=fixed_batch).to_dict()
    sweep.experiment.save(document)
    return code, document


def summarise(sweep: Sweep, document: Document, code: int) -> dict[str, Any]:
    """Returns the object that the command prints last."""
    statuses = [row["status"] for row in document["rows"]]
    return {
        "trials": len(statuses),
        **{status: statuses.count(status) for status in dict.fromkeys(statuses)},
        "best": document["conclusion"]["best"],
        "samples_per_sec": document["conclusion"]["samples_per_sec"],
        "output_json": str(sweep.output),
        "html": str(sweep.output.with_suffix(".html")),
        "exit_code": code,
    }


def load_document(sweep: Sweep, resume: bool) -> tuple[dict[str, Any], list[SweepRow]]:
    """Returns header and rows of a new sweep, or of the one to continue."""

    def parse(document: Document) -> tuple[dict[str, Any], list[SweepRow]]:
        return document["header"], [SweepRow.from_dict(row) for row in document["rows"]]

    header = sweep.header()
    found = sweep.experiment.load(header, parse, resume=resume, differences=differences)
    return found or (header, [SweepRow(combination) for combination in grid(sweep.values)])


def make_document(header: Mapping[str, Any], rows: Sequence[SweepRow]) -> Document:
    return {"header": dict(header), "rows": rows_to_json(rows), "conclusion": None}


def _measure_rows(
    runner: Runner,
    progress: Progress,
    sweep: Sweep,
    header: Mapping[str, Any],
    rows: list[SweepRow],
    time_limit: float,
) -> None:
    """Measures what `rows` do not have yet, replaces them in place, and saves them after each repeat."""
    if not sweep.output.exists():
        for left in filter(pathlib.Path.is_dir, runner.folder.iterdir()):  # of results that were removed
            shutil.rmtree(left)
    sweep.experiment.save(make_document(header, rows))

    def keep(job: tuple[int, int], result: TrialResult) -> None:
        index, number = job
        repeat = dataclasses.replace(result, round=number)
        rows[index] = rows[index].with_repeat(repeat)
        rows[:] = skip_larger(rows, index)
        sweep.experiment.save(make_document(header, rows))
        progress.done = progress.total - len(list(open_trials(rows, sweep.repeats)))
        _report(rows, index, repeat, progress, len(sweep.gpus or [0]))

    progress.done = progress.total - len(list(open_trials(rows, sweep.repeats)))
    if sweep.gpus:
        return _measure_on_cards(runner, progress, sweep, rows, time_limit, keep)
    # The next trial is looked for after each one: a trial that runs out of memory takes others off the list.
    for index, number in open_trials(rows, sweep.repeats):
        request = sweep.request(rows[index].combination)
        keep((index, number), measured_or_run(runner, trial_name(index, number), request, time_limit))


def _measure_on_cards(
    runner: Runner,
    progress: Progress,
    sweep: Sweep,
    rows: list[SweepRow],
    time_limit: float,
    keep: Callable[[tuple[int, int], TrialResult], None],
) -> None:
    """Measures what `rows` do not have yet, one trial on each card at a time."""
    cards, running, began = sweep.gpus or (), set[tuple[int, int]](), time.monotonic()
    used: set[tuple[int, int]] = set()  # combinations and cards that have met

    def take(card: int) -> tuple[int, int] | None:
        waiting = [job for job in open_trials(rows, sweep.repeats) if job not in running]
        of_round = [job for job in waiting if job[1] == waiting[0][1]]
        job = next_job(of_round, card, cards, used)
        if job is not None:
            running.add(job)
            used.add((job[0], card))
        return job

    def run(job: tuple[int, int], card: int, check: Callable[[], None]) -> TrialResult:
        request = dataclasses.replace(sweep.request(rows[job[0]].combination), gpu_index=card)
        quiet = Runner(runner.folder, grace=runner.grace, on_tick=check)
        result = measured_or_run(quiet, trial_name(*job), request, time_limit, cards)
        return result.on_card(card_name(card))

    def done(job: tuple[int, int], result: TrialResult) -> None:
        running.remove(job)
        keep(job, result)

    def tick() -> None:
        progress.tick(Task("", (), f"{len(running)} trials on {len(cards)} GPUs"), time.monotonic() - began)

    run_on_cards(cards, take, run, done, tick)


def next_job(
    jobs: Sequence[tuple[int, int]], card: int, cards: Sequence[int], used: Collection[tuple[int, int]]
) -> tuple[int, int] | None:
    """Returns the next of the (combination, round) for a card; None if it has to leave them to others.

    A combination is on every card once before it is on any of them twice, however slow a card is: else the speed of a
    card could not be told from that of a combination. `used` holds the combinations and cards that have met.
    """
    fresh = [job for job in jobs if (job[0], card) not in used]
    anywhere = [job for job in jobs if all((job[0], other) in used for other in cards)]
    return next(iter([*fresh, *anywhere]), None)


def card_name(index: int) -> str:
    return f"GPU {index}"


def trial_name(index: int, number: int) -> str:
    """Returns the name of the folder of a repeat."""
    return f"{index:03d}_round{number}"


def open_trials(rows: Sequence[SweepRow], repeats: int) -> Iterator[tuple[int, int]]:
    """Yields (row, round) of the repeats to measure, as `rows` stand when the next one is asked for."""
    for number in range(repeats):
        for index in interleaved(len(rows), number, repeats):
            if rows[index].is_open(repeats) and all(repeat.round != number for repeat in rows[index].repeats):
                yield index, number


def interleaved(count: int, number: int, rounds: int) -> list[int]:
    """Returns the order of round `number`: each round starts elsewhere."""
    start = number * count // rounds
    return [(start + i) % count for i in range(count)]


def measured_or_run(
    runner: Runner, name: str, request: TrialRequest, time_limit: float, cards: Sequence[int] = ()
) -> TrialResult:
    """Measures one repeat, unless it was measured after its sweep had been killed, on any of `cards`.

    One that failed then may have failed because its sweep was killed, so it is run again.
    """
    places: Sequence[int | None] = cards or [request.gpu_index]
    for card in places:
        left = finished_result(runner.folder / name, dataclasses.replace(request, gpu_index=card))
        if left is not None and left.status == OK:
            return left.on_card(card_name(card)) if cards and card is not None else left
    began = time.monotonic()
    result = run_trial(runner, request, time_limit=time_limit, limit_flag="--time_limit", name=name)
    return dataclasses.replace(result, trial_seconds=round(time.monotonic() - began, 3))


def _report(rows: Sequence[SweepRow], index: int, repeat: TrialResult, progress: Progress, at_once: int = 1) -> None:
    measured = [(row.samples_per_sec or 0.0, row.combination.label) for row in rows if row.status == OK]
    if measured:
        speed, label = max(measured)
        progress.best = f"best {short(speed)} images/s ({label})"
    label = rows[index].combination.label
    pace = repeat.trial_seconds / at_once if repeat.trial_seconds is not None else None
    progress.report(label, repeat.status, repeat.in_words(), pace=pace)
