"""Tuning as a command: settings worth a try on this machine, its memory, trials in processes, files at the end."""

import dataclasses
import itertools
import os
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base import processes
from jepa_jax.base.console import Console, ProgressBar
from jepa_jax.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, UserError
from jepa_jax.base.text import duration, short
from jepa_jax.config.schema import validate
from jepa_jax.data.contract import element_bytes
from jepa_jax.data.facts import data_facts
from jepa_jax.reports import sweep_report
from jepa_jax.runtime.allocator import POOL_VARIABLE, pool_fraction
from jepa_jax.runtime.provenance import describe_hardware, num_cores
from jepa_jax.tuning.sweep import EXIT_NONE_MEASURED
from jepa_jax.tuning.sweep_settings import grid_values
from jepa_jax.tuning.trial import OK, Combination, TrialRequest, combination_of
from jepa_jax.tuning.trial_process import CACHE, STOP_SECONDS, run_trial
from jepa_jax.tuning.tune_results import Store, best_so_far, conclude, make_header
from jepa_jax.tuning.tuned import write_tuned
from jepa_jax.tuning.tuner import Outcome, Search
from jepa_jax.tuning.tuner_space import Space
from jepa_jax.tuning.tuner_trials import Limits, Run, Trial

MEMORY_SHARE = 0.8  # of the memory that is free when a search on a CPU begins
IN_MEMORY_SOURCES = ("shapes", "cifar10", "idx", "npz")  # read as a whole anyway
MOST_RESIDENT_BYTES = 2**31  # of images that a search tries to keep on the device
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says; `values` holds texts of lists by flag, None where the machine decides."""

    output_dir: pathlib.Path
    budget: str = "10m"
    values: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    fixed_effective_batch: str = ""  # "", "config" or a number
    margin: float = 0.08
    memory_limit_gb: float | None = None
    use_dummy_data: bool = False
    gpu_index: int | None = None
    resume: bool = False
    config_name: str = "config"


def tune(config: Any, options: Options, console: Console, run: Run | None = None) -> tuple[int, dict[str, Any]]:
    """Searches, writes tuned.json, tune.json and tune.html; returns the exit code and the result.

    `run`: what measures a trial; by default a process.
    """
    validate(config)
    budget = parse_budget(options.budget)
    space = make_space(config, options)
    hardware = describe_hardware(options.gpu_index)
    memory, source = memory_limit(options, hardware)
    limits = Limits(budget, memory, options.margin, is_guess=options.memory_limit_gb is None)
    settings = {
        "space": dataclasses.asdict(space), "use_dummy_data": options.use_dummy_data, "gpu_index": options.gpu_index,
        "memory_limit_gb": options.memory_limit_gb,
    }  # fmt: skip
    folder = options.output_dir
    store = Store(folder, make_header(config, options.config_name, limits, hardware, settings))
    recorded = store.open(options.resume)
    if recorded:  # what is free changes from one start to the next; decisions must not
        limits = dataclasses.replace(limits, memory_bytes=store.header["memory_limit_bytes"])
        source = "as at the first start"
    console.line(
        f"memory: {(limits.memory_bytes or 0) / 2**30:.1f} GiB may be used, {source}; "
        f"{100 * options.margin:.0f} % of it stay free"
    )
    refusal = f"--output_dir = {folder}: another search is running there; wait for it or use another"
    code, outcome = EXIT_OK, None
    with processes.only_one(folder / ".lock", refusal), Watch(budget) as watch:
        for left in (folder / "trials").glob(f"*/{processes.PROCESS_FILE}"):  # of a search that was killed
            processes.stop_left_over(left.parent, STOP_SECONDS)

        def on_trial(trials: list[Trial], stage: str) -> None:
            store.save(search)
            watch.trial(trials, stage)

        search = Search(
            config.to_dict(), space, limits, run or in_process(folder / "trials", watch, len(recorded)),
            use_dummy_data=options.use_dummy_data, gpu_index=options.gpu_index, recorded=recorded, on_trial=on_trial,
        )  # fmt: skip
        watch.search = search
        try:
            with processes.sigterm_raises():
                outcome = search.search()
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        except processes.Terminated:
            code = EXIT_TERMINATED
    outcome = outcome or best_so_far(search)
    result = finish(config, options, search, outcome, store, code)
    for sentence in result.pop("text"):
        console.line(sentence)
    if outcome.chosen is None and code == EXIT_OK:
        code = EXIT_NONE_MEASURED
    return code, result | {"exit_code": code}


def parse_budget(text: str) -> float:
    """Seconds of "90s", "10m", "1.5h" or a plain number of seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([smh]?)\s*", text)
    if not found or float(found[1]) <= 0:
        raise UserError(f"--budget={text}: not a length of time; write 90s, 10m or 1.5h")
    return float(found[1]) * UNITS[found[2] or "s"]


def make_space(config: Any, options: Options) -> Space:
    """Lists of the command line; where there is none, what is worth a try on this machine."""
    own = combination_of(config)
    texts = {flag: text or None for flag, text in options.values.items()}
    given = grid_values(config, texts)

    def values(flag: str, default: Sequence[Any], present: Any) -> tuple:
        return tuple(dict.fromkeys([present, *(given[flag] if texts.get(flag) else default)]))

    workers = worker_counts(num_cores())
    pipelines = ["grain"] + (["device"] if fits_on_device(config.data, options.use_dummy_data) else [])
    remats = ["none"] + ([] if config.model.name == "patchnet" else ["full"])
    batches = values("batch_sizes", (), own.batch_size) if texts.get("batch_sizes") else ()
    return Space(
        num_workers=tuple(sorted(values("num_workers", workers, own.num_workers))),
        precisions=values("precisions", ("float32", "bfloat16"), own.precision),
        remats=values("remats", remats, own.remat),
        pipelines=values("pipelines", pipelines, own.pipeline),
        grad_accum_steps=values("grad_accum", (), own.grad_accum_steps) if texts.get("grad_accum") else (),
        batch_sizes=tuple(sorted(batches)),
        fixed_batch=fixed_batch(options.fixed_effective_batch, own.batch_size),
    )


def worker_counts(cores: int) -> list[int]:
    """None, and a quarter, half and all of the cores, up to 16."""
    return sorted({0, *(max(1, min(16, cores // part)) for part in (4, 2, 1))})


def fits_on_device(data: Any, dummy: bool) -> bool:
    """Whether a set that stays on the device is worth a try: its images, by what is known before they are read."""
    if not dummy and data.source not in IN_MEMORY_SOURCES:
        return False
    facts = data_facts(data, assume=True)
    return facts.num_train * element_bytes(facts.spec) <= MOST_RESIDENT_BYTES


def fixed_batch(text: str, own: int) -> int | None:
    if text in ("", "0"):
        return None
    if text == "config":
        return own
    if not text.isdigit() or int(text) < 2:
        raise UserError(f"--fixed_effective_batch={text}: write a number of images, or config for that of the config")
    return int(text)


def memory_limit(options: Options, hardware: Mapping[str, Any]) -> tuple[float, str]:
    """Bytes that a trial may take, as far as is known before the first one, and where that comes from."""
    import psutil

    if options.memory_limit_gb is not None:
        return options.memory_limit_gb * 2**30, "by --memory_limit_gb"
    if hardware["gpu_memory_bytes"]:
        share = pool_fraction(os.environ)
        return share * hardware["gpu_memory_bytes"], (
            f"about: {100 * share:.0f} % of a {hardware['gpu_name']}, until the first trial has read what JAX takes "
            f"({POOL_VARIABLE} sets another share)"
        )
    words = f"{100 * MEMORY_SHARE:.0f} % of what is free (--memory_limit_gb sets another limit)"
    return MEMORY_SHARE * psutil.virtual_memory().available, words


class Watch(ProgressBar):
    """A bar in seconds of the budget, with the best so far; a line on stderr for each trial."""

    def __init__(self, budget: float):
        super().__init__(budget)
        self.search: Search | None = None

    def tick(self, label: str) -> None:
        if self.search is not None:
            left = max(0.0, self.search.seconds_left())
            spent = self.search.limits.budget_seconds - left
            self.show(spent, label, self.search.stage, f"{duration(left)} left", self._best())

    def trial(self, trials: Sequence[Trial], stage: str) -> None:
        result, label = trials[-1]["result"], Combination.from_dict(trials[-1]["combination"]).label
        figures = f"{short(result['samples_per_sec'])} images/s" if result["status"] == OK else result["reason"]
        self.line(f"{len(trials)} · {stage} · {label} · {result['status']} · {figures}")

    def _best(self) -> str:
        rows = self.search.rows().values() if self.search else ()
        speed = max((row["samples_per_sec"] for row in rows if row["status"] == OK), default=None)
        return "" if speed is None else f"best {short(speed)} images/s"


def in_process(directory: pathlib.Path, watch: Watch, done: int) -> Run:
    """Measures each trial in a process of its own, in a folder of its number."""
    numbers = itertools.count(done + 1)

    def run(request: TrialRequest, time_limit: float) -> dict[str, Any]:
        label = request.combination.label
        return run_trial(
            request, directory, time_limit=time_limit, name=f"{next(numbers):03d}", on_tick=lambda: watch.tick(label)
        )  # fmt: skip

    return run


def finish(config: Any, options: Options, search: Search, outcome: Outcome, store: Store, code: int) -> dict[str, Any]:
    """Writes what was found; returns the result with its text."""
    rows = search.rows()
    conclusion = conclude(config, search, outcome)
    folder = options.output_dir
    document = store.save(search, conclusion)
    sweep_report.write_html(document, folder / "tune.html")
    result: dict[str, Any] = {
        "chosen": conclusion["best"],
        "samples_per_sec": conclusion["samples_per_sec"],
        "samples_per_sec_ci95": conclusion["samples_per_sec_ci95"],
        "gain": conclusion["gain"],
        "confirmed": outcome.confirmed,
        "trials": len(search.trials),
        "combinations": len(rows),
        "seconds": round(search.limits.budget_seconds - search.seconds_left(), 1),
        "not_tried": [combination.label for combination in outcome.untried],
        "tuned": None,
        "html": str(folder / "tune.html"),
        "text": conclusion["text"],
    }
    if outcome.chosen in rows and code == EXIT_OK:
        row, path = rows[outcome.chosen], folder / "tuned.json"
        facts = {key: store.header[key] for key in ("hardware", "versions", "config_name", "config_hash", "config")}
        write_tuned(
            path, outcome.chosen, samples_per_sec=row["samples_per_sec"],
            samples_per_sec_ci95=row["samples_per_sec_ci95"], confirmed=outcome.confirmed, gain=conclusion["gain"],
            data_source=row["data_source"], created=store.header["created"], command=store.header["command"],
            text=conclusion["text"], **facts,
        )  # fmt: skip
        shutil.rmtree(folder / "trials" / CACHE, ignore_errors=True)
        result["tuned"] = str(path)
        same = "--config=<the same, with its overrides>"
        result["text"] = [*result["text"], f"Train with: python scripts/train.py {same} --workdir=DIR --tuned={path}"]
    return result
