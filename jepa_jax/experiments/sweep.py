"""The throughput sweep: measures every combination of a grid, one process at a time, or one on each of many GPUs.

Rounds are interleaved: each combination once, then each again, starting elsewhere, so that what slows a machine down
for a while affects all of them. The results are on disk after each repeat; the same command with --resume continues.
`submit_array` gives the trials to SLURM instead; `collect` reads what they have measured.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import EXIT_OK, UserError
from jepa_jax.base.files import make_folder, write_json
from jepa_jax.base.text import short
from jepa_jax.config.groups import Config
from jepa_jax.data.sources import open_source
from jepa_jax.experiments.engine import EXIT_NO_RESULT, Document, Experiment, TaskProgress, run_on_cards
from jepa_jax.experiments.recommendation import recommend
from jepa_jax.experiments.rows import OK, PENDING, REFUSED, SweepRow, TrialResult, rows_to_json, skip_larger
from jepa_jax.experiments.settings import LATER_FLAGS, Combination, TrialRequest, all_combinations
from jepa_jax.experiments.slurm import make_executor
from jepa_jax.experiments.trial import CACHE, RESULT, STOP_SECONDS, finished_result, run_trial
from jepa_jax.runtime.provenance import base_header, describe_hardware, differences

OPTIONS = ("use_dummy_data", "gpu_index", "memory_fraction")  # of a request
LIMIT_FLAG = "--time_limit"
SPARE_SECONDS = 60  # of a SLURM task, beyond the time limit of its trial
Job = tuple[int, int]  # index of a row, number of a round


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
        said = {flag: values for flag, values in self.values.items() if flag not in LATER_FLAGS or len(values) > 1}
        lists = {flag: list(values) for flag, values in said.items()}
        return {
            **base_header(self.config, self.config_name, hardware),
            **counts,
            "memory_limit_bytes": hardware["gpu_memory_bytes"],
            "settings": lists | counts | {name: getattr(self, name) for name in (*OPTIONS, "gpus")},
        }


def run_sweep(
    sweep: Sweep, *, time_limit: float, resume: bool, retry_failed: bool = False, fixed_batch: int | None = None
) -> tuple[int, Document]:
    """Measures what is not measured yet; returns the exit code and the document, which is also on disk.

    `retry_failed` continues as `resume` does, and measures again what failed or was skipped.
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
    progress = TaskProgress(len(rows) * sweep.repeats, "repeats")
    code = sweep.experiment.execute(
        lambda: _measure_rows(sweep, header, rows, progress, time_limit), progress, grace=STOP_SECONDS
    )
    if not any(open_trials(rows, sweep.repeats)):
        shutil.rmtree(sweep.experiment.folder / CACHE, ignore_errors=True)  # nothing is left to compile
    return _conclude(sweep, header, rows, fixed_batch, code)


def _conclude(
    sweep: Sweep, header: Mapping[str, Any], rows: Sequence[SweepRow], fixed_batch: int | None, code: int = EXIT_OK
) -> tuple[int, Document]:
    """Saves the document with its conclusion; returns it and the exit code."""
    document = make_document(header, rows)
    document["conclusion"] = recommend(rows, config=sweep.config, fixed_batch=fixed_batch).to_dict(sweep.config)
    sweep.experiment.save(document)
    is_empty = code == EXIT_OK and not any(row.status == OK for row in rows)
    return EXIT_NO_RESULT if is_empty else code, document


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
    found = sweep.experiment.load(header, parse, differences, resume=resume)
    return found or (header, [SweepRow(combination) for combination in all_combinations(sweep.values)])


def make_document(header: Mapping[str, Any], rows: Sequence[SweepRow]) -> Document:
    return {"header": dict(header), "rows": rows_to_json(rows), "conclusion": None}


def _measure_rows(
    sweep: Sweep, header: Mapping[str, Any], rows: list[SweepRow], progress: TaskProgress, time_limit: float
) -> None:
    """Measures what `rows` do not have yet, replaces them in place, and saves them after each repeat."""
    folder = sweep.experiment.folder
    if not sweep.output.exists():
        for left in filter(pathlib.Path.is_dir, folder.iterdir()):  # of results that were removed
            shutil.rmtree(left)
    sweep.experiment.save(make_document(header, rows))
    cards: Sequence[int | None] = sweep.gpus or (None,)
    running: set[Job] = set()
    used: set[tuple[int, int | None]] = set()  # combinations and cards that have met

    def take(card: int | None) -> Job | None:
        # Looked for after each trial: one that runs out of memory takes others off the list.
        waiting = [job for job in open_trials(rows, sweep.repeats) if job not in running]
        job = next_job([job for job in waiting if job[1] == waiting[0][1]], card, cards, used)
        if job is not None:
            running.add(job)
            used.add((job[0], card))
        return job

    def run(job: Job, card: int | None, check: Callable[[], None]) -> TrialResult:
        request = sweep.request(rows[job[0]].combination)
        request = request if card is None else dataclasses.replace(request, gpu_index=card)
        # One that failed after its sweep was killed may have failed because of that, so it is run again.
        left = finished_result(folder / trial_name(*job), request)
        if left is not None and left.status == OK:
            return left
        limits: Any = {"time_limit": time_limit, "limit_flag": LIMIT_FLAG}
        return run_trial(folder / trial_name(*job), request, **limits, on_tick=check)

    def keep(job: Job, result: TrialResult) -> None:
        running.remove(job)
        index, number = job
        rows[index] = rows[index].with_repeat(dataclasses.replace(result, round=number))
        rows[:] = skip_larger(rows, index)
        sweep.experiment.save(make_document(header, rows))
        progress.done = progress.total - len(list(open_trials(rows, sweep.repeats)))
        measured = [(row.samples_per_sec or 0.0, row.combination.label) for row in rows if row.status == OK]
        if measured:
            speed, label = max(measured)
            progress.best = f"best {short(speed)} samples/s ({label})"
        progress.report(rows[index].combination.label, result.status, result.in_words())

    def tick() -> None:
        labels = [rows[index].combination.label for index, _ in running]
        progress.tick(labels[0] if len(labels) == 1 else f"{len(labels)} trials on {len(cards)} GPUs")

    progress.done = progress.total - len(list(open_trials(rows, sweep.repeats)))
    run_on_cards(cards, take, run, keep, tick)


def next_job(
    jobs: Sequence[Job], card: int | None, cards: Sequence[int | None], used: Collection[tuple[int, int | None]]
) -> Job | None:
    """Returns the next job for a card; None if it has to leave them to others.

    A combination is on every card once before it is on any of them twice, however slow a card is: otherwise the speed
    of a card could not be told from that of a combination. `used` holds the combinations and cards that have met.
    """
    fresh = [job for job in jobs if (job[0], card) not in used]
    anywhere = [job for job in jobs if all((job[0], other) in used for other in cards)]
    return next(iter([*fresh, *anywhere]), None)


def trial_name(index: int, number: int) -> str:
    return f"{index:03d}_round{number}"


def open_trials(rows: Sequence[SweepRow], repeats: int) -> Iterator[Job]:
    """Yields (row, round) of the repeats to measure, as `rows` stand when the next one is asked for.

    Each round starts with another row.
    """
    for number in range(repeats):
        start = number * len(rows) // repeats
        for index in [*range(start, len(rows)), *range(start)]:
            done = [repeat.round for repeat in rows[index].repeats]
            if rows[index].status in (PENDING, OK) and len(done) < repeats and number not in done:
                yield index, number


def submit_array(sweep: Sweep, *, time_limit: float, resume: bool, slurm_options: str) -> dict[str, Any]:
    """Submits an array of SLURM tasks, one per repeat that is not measured yet; returns what the command prints."""
    header, rows = load_document(sweep, resume)
    if not sweep.use_dummy_data:
        open_source(sweep.config.data, "train")  # reports missing data now, instead of in every task
    folder = sweep.experiment.folder.resolve()
    minutes = -(-int(time_limit + SPARE_SECONDS) // 60)
    executor = make_executor(folder / "slurm", "jepa-jax-sweep", slurm_options, gres="gpu:1", time=minutes)
    rows = _collected(sweep, rows)
    make_folder(sweep.output.parent)
    sweep.experiment.save(make_document(header, rows))
    jobs = list(open_trials(rows, sweep.repeats))
    for job in jobs:
        shutil.rmtree(folder / trial_name(*job), ignore_errors=True)
    requests = [sweep.request(rows[index].combination).to_dict() for index, _ in jobs]
    names = [trial_name(*job) for job in jobs]
    count, job_id = len(jobs), None
    if jobs:
        submitted = executor.map_array(run_task, [str(folder)] * count, names, requests, [time_limit] * count)
        job_id = submitted[0].job_id.split("_")[0]
    return {"tasks": count, "job": job_id, "output_json": str(sweep.output), "exit_code": EXIT_OK}


def run_task(folder: str, name: str, request: Mapping[str, Any], time_limit: float) -> None:
    """Runs one repeat as a task of SLURM and leaves its result, whatever it is, for `collect`."""
    place = pathlib.Path(folder) / name
    result = run_trial(place, TrialRequest.from_dict(request), time_limit=time_limit, limit_flag=LIMIT_FLAG)
    write_json(place / RESULT, result.to_dict())


def collect(sweep: Sweep, *, fixed_batch: int | None = None) -> tuple[int, Document, int]:
    """Reads the results of the tasks that have ended; returns an exit code, the document, and how many are missing."""
    if not sweep.output.exists():
        raise UserError(f"--output_json = {sweep.output}: no sweep was begun there; begin it with --slurm_array")
    header, rows = load_document(sweep, resume=True)
    rows = _collected(sweep, rows)
    return *_conclude(sweep, header, rows, fixed_batch), len(list(open_trials(rows, sweep.repeats)))


def _collected(sweep: Sweep, rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Returns the rows with every repeat that has ended since; a row that fails has no more repeats to come."""
    rows = list(rows)
    for index, number in open_trials(rows, sweep.repeats):
        request = sweep.request(rows[index].combination)
        try:
            request.configuration()
            result = finished_result(sweep.experiment.folder / trial_name(index, number), request)
        except UserError as error:
            result = TrialResult(REFUSED, str(error))
        if result is not None:
            rows[index] = rows[index].with_repeat(dataclasses.replace(result, round=number))
    return rows
