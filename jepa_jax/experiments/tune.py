"""Searches for the fastest settings of this machine within a budget of time, and writes tuned.json for training.

tune.json is written after each trial; the same command with --resume continues from it.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from jepa_jax.base.console import Console
from jepa_jax.base.errors import EXIT_OK, UserError
from jepa_jax.base.text import short
from jepa_jax.config.groups import Config
from jepa_jax.experiments.engine import EXIT_NO_RESULT, Document, Experiment, TaskProgress
from jepa_jax.experiments.recommendation import (
    Recommendation,
    batch_sentences,
    choice_sentences,
    knob_effects,
    what_limits,
)
from jepa_jax.experiments.rows import TrialResult, rows_to_json
from jepa_jax.experiments.search import Search
from jepa_jax.experiments.search_space import SearchSpace, make_space
from jepa_jax.experiments.search_trials import WARMUP_BATCHES, RunTrial, SearchLimits, SearchTrial
from jepa_jax.experiments.settings import Combination, TrialRequest
from jepa_jax.experiments.trial import CACHE, STOP_SECONDS, device_options, module_folder, run_trial
from jepa_jax.experiments.tuned_file import write_tuned
from jepa_jax.runtime.allocator import pool_fraction
from jepa_jax.runtime.provenance import base_header, describe_hardware, differences

MEMORY_SHARE = 0.8  # of the memory that is free when a search on a CPU begins
FIGURES = ("samples_per_sec", "samples_per_sec_ci95", "gain")  # of a conclusion
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
# Options that have to be the same for a search to continue.
TUNE_SETTINGS = ("use_dummy_data", "gpu_index", "memory_limit_gb", "memory_fraction", "margin")


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """What the command line says; `values` holds the texts of lists by flag, None where the machine decides."""

    output_dir: pathlib.Path
    budget: str = "10m"
    values: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    fixed_effective_batch: str = ""  # "", "config" or a number
    margin: float = 0.08
    memory_limit_gb: float | None = None
    memory_fraction: float | None = None
    use_dummy_data: bool = False
    gpu_index: int | None = None
    resume: bool = False
    config_name: str = "config"


def tune(
    config: Config, options: TuneOptions, console: Console, run: RunTrial | None = None
) -> tuple[int, dict[str, Any], Document]:
    """Searches, and writes tune.json and, unless it is interrupted, tuned.json.

    Returns the exit code, the object that the command prints last, and the document of the search.
    """
    fixed_batch, dummy = options.fixed_effective_batch, options.use_dummy_data
    space = make_space(config, options.values, fixed_batch=fixed_batch, use_dummy_data=dummy)
    given = TrialRequest(config.to_dict(), Combination.of(config), use_dummy_data=dummy)
    return SearchRun(given, space, options, config, run).execute(console)


def tune_own_step(
    make: Callable[..., Any] | str,
    batch: int,
    batch_sizes: Sequence[int],
    precisions: Sequence[str],
    workers: Sequence[int],
    options: TuneOptions,
    console: Console,
) -> tuple[int, dict[str, Any], Document]:
    """Searches as `tune` does for a step that `make` makes, around the first value of each list.

    The result holds the chosen arguments of `make`; there is no tuned.json.
    """
    given = Combination(batch, workers[0], 1, precisions[0], remat="", pipeline="")
    space = SearchSpace(tuple(sorted(workers)), tuple(precisions), (), (), batch_sizes=tuple(sorted(batch_sizes)))
    request = TrialRequest({}, given, make=make if isinstance(make, str) else reference_of(make))
    module_folder(request.make)  # refuses a module that cannot be found
    options = dataclasses.replace(options, config_name=request.make)
    code, result, document = SearchRun(request, space, options, None, None).execute(console)
    names = {"batch": "batch_size", "precision": "precision", "workers": "num_workers"}
    chosen = result["chosen"] and {argument: result["chosen"][knob] for argument, knob in names.items()}
    return code, result | {"chosen": chosen}, document


def reference_of(function: Callable[..., Any]) -> str:
    """Returns "module:function", by which other processes import a function; that of a script is its file."""
    module, name = function.__module__, function.__qualname__
    if "." in name:
        raise UserError(f"make = {name}: other processes cannot import it; define it at the top of a module")
    if module == "__main__":
        module = pathlib.Path(str(sys.modules["__main__"].__file__)).stem
    return f"{module}:{name}"


class SearchRun:
    """A search as an experiment: the files that it continues from, its trials as processes, and its outcome."""

    def __init__(
        self,
        given: TrialRequest,
        space: SearchSpace,
        options: TuneOptions,
        config: Config | None,
        run: RunTrial | None,
    ):
        """Takes what `tune` takes, and a trial of the settings to search around."""
        place, budget = options.output_dir, parse_budget(options.budget)
        self.config, self.options = config, options
        self.experiment = Experiment("search", "--output_dir", place, place / "tune.json", place / "trials")
        self.progress = TaskProgress(budget, "s")  # the unit of work is a second of the budget
        hardware = describe_hardware(options.gpu_index)
        memory, self._memory_source = memory_limit(options, hardware)
        settings = {"space": dataclasses.asdict(space)} | {name: getattr(options, name) for name in TUNE_SETTINGS}
        if given.make:
            settings |= {"make": given.make, "given": given.combination.to_dict()}
        self.header: dict[str, Any] = {
            **base_header(config, options.config_name, hardware),
            "kind": "tune",
            "memory_limit_bytes": memory,
            "budget_seconds": budget,
            "settings": json.loads(json.dumps(settings)),
        }
        recorded: list[SearchTrial] = []
        if found := self.experiment.load(self.header, read_trials, differences, resume=options.resume):
            self.header, recorded = {**found[0], "budget_seconds": budget}, found[1]
            self._memory_source = "as at the first start"  # free memory changes from start to start, decisions must not
        device = device_options(hardware, options.memory_fraction)
        given = dataclasses.replace(given, warmup_batches=WARMUP_BATCHES, gpu_index=options.gpu_index, **device)
        known = self.header["memory_limit_bytes"]
        limits = SearchLimits(budget, known, options.margin, is_guess=options.memory_limit_gb is None)
        run = run or self._run_in_process
        self.search = Search(given, space, limits, run, recorded=recorded, on_trial=self._on_trial)

    def execute(self, console: Console) -> tuple[int, dict[str, Any], Document]:
        """Searches; returns the exit code, the object that the command prints last, and the document."""
        console.line(
            f"memory: {(self.search.limits.memory_bytes or 0) / 2**30:.1f} GiB may be used, {self._memory_source}; "
            f"{100 * self.options.margin:.0f} % of it stay free"
        )
        code = self.experiment.execute(self.search.search, self.progress, grace=STOP_SECONDS)
        if code != EXIT_OK:
            self.search.take_best_so_far()
        document = self._save(recommend_outcome(self.config, self.search))
        tuned = None
        if code == EXIT_OK:
            shutil.rmtree(self.experiment.folder / CACHE, ignore_errors=True)
            code = EXIT_NO_RESULT if self.search.chosen is None else EXIT_OK
            tuned = self._write_tuned(document["conclusion"])
        return code, self._result(code, document, tuned), document

    def _run_in_process(self, request: TrialRequest, time_limit: float) -> TrialResult:
        self.progress.done, began = self.search.seconds_spent(), time.monotonic()
        folder = self.experiment.folder / f"{len(self.search.all_trials()) + 1:03d}"

        def tick() -> None:
            self.progress.tick(request.combination.label, time.monotonic() - began)

        return run_trial(folder, request, time_limit=time_limit, on_tick=tick)

    def _on_trial(self, trial: SearchTrial) -> None:
        self._save()
        self.progress.done = round(self.search.seconds_spent(), 1)
        speed = max((row.samples_per_sec or 0.0 for row in self.search.rows.values()), default=0.0)
        self.progress.best = f"best {short(speed)} samples/s" if speed else ""
        self.progress.report(trial.combination.label, trial.result.status, trial.result.in_words())

    def _save(self, recommendation: Recommendation | None = None) -> Document:
        document = {
            # Once a trial has read the memory of the device, the limit is no longer a guess.
            "header": {**self.header, "memory_limit_bytes": self.search.limits.memory_bytes},
            "rows": rows_to_json(self.search.rows.values()),
            "conclusion": recommendation.to_dict(self.config) if recommendation else None,
            "trials": [trial.to_dict() for trial in self.search.all_trials()],
        }
        self.experiment.save(document)
        return document

    def _write_tuned(self, conclusion: Mapping[str, Any]) -> str | None:
        """Writes tuned.json if there is a choice for a config; returns its place."""
        chosen, search = self.search.chosen, self.search
        if chosen is None or self.config is None:
            return None
        place = str(self.options.output_dir / "tuned.json")
        copied = ("created", "command", "hardware", "versions", "config_name", "config_hash", "config")
        facts = {key: self.header[key] for key in copied} | {key: conclusion[key] for key in (*FIGURES, "text")}
        facts |= {"confirmed": search.confirmed, "memory_fraction": search.given.memory_fraction}
        write_tuned(place, chosen, **facts, data_source=search.rows[chosen].shared("data_source"))
        return place

    def _result(self, code: int, document: Document, tuned: str | None) -> dict[str, Any]:
        conclusion, search = document["conclusion"], self.search
        return {
            "chosen": conclusion["best"],
            **{key: conclusion[key] for key in FIGURES},
            "confirmed": search.confirmed,
            "trials": len(search.trials),
            "combinations": len(document["rows"]),
            "seconds": round(search.seconds_spent(), 1),
            "not_tried": [combination.label for combination in search.untried],
            "tuned": tuned,
            "html": str(self.options.output_dir / "tune.html"),
            "exit_code": code,
        }


def read_trials(document: Document) -> tuple[dict[str, Any], list[SearchTrial]]:
    return document["header"], [SearchTrial.from_dict(trial) for trial in document["trials"]]


def parse_budget(text: str) -> float:
    """Returns the seconds of "90s", "10m", "1.5h" or a plain number of seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([smh]?)\s*", text)
    if not found or float(found[1]) <= 0:
        raise UserError(f"--budget={text}: not a length of time; write 90s, 10m or 1.5h")
    return float(found[1]) * UNITS[found[2] or "s"]


def memory_limit(options: TuneOptions, hardware: Mapping[str, Any]) -> tuple[float, str]:
    """Returns the bytes that a trial may take, as far as is known before the first one, and where they come from."""
    if options.memory_limit_gb is not None:
        return options.memory_limit_gb * 2**30, "by --memory_limit_gb"
    if hardware["gpu_memory_bytes"]:
        share = options.memory_fraction or pool_fraction(os.environ)
        source = f"about: {100 * share:.0f} % of a {hardware['gpu_name']} (--memory_fraction sets another share)"
        return share * hardware["gpu_memory_bytes"], source
    source = f"{100 * MEMORY_SHARE:.0f} % of the free memory (--memory_limit_gb sets another limit)"
    return MEMORY_SHARE * psutil.virtual_memory().available, source


def recommend_outcome(config: Config | None, search: Search) -> Recommendation:
    """Returns the choice of a search and its reasons, and what each knob does."""
    rows, chosen, noise = search.rows, search.chosen, search.model.noise_percent
    knobs = tuple(knob_effects(list(rows.values()), search.model))
    if chosen is None:
        return Recommendation(
            None, ("Keep the settings as given: nothing could be compared with them.", *search.notes), knobs, noise
        )
    assert search.choice is not None  # made with it
    choice = dataclasses.replace(search.choice, best=rows[chosen])  # with the trials since then
    given, reference = "the config as given" if config else "the settings as given", search.reference
    if reference != search.given.combination.without_idle_workers():  # --fixed_effective_batch asks for another batch
        given = f"the config with its batch made {reference.batch_size:,}"
    sentences = choice_sentences(choice, given, search.why_not(reference))
    if search.confirmed:
        how = " with a validation pass and a checkpoint" if config else ""
        sentences.append(f"Confirmed by a longer run{how}.")
    sentences += [what_limits(choice.best, search.limits.memory_bytes), *search.notes]
    if search.untried:
        named = "; ".join(combination.label for combination in search.untried)
        sentences.append(f"Not tried for lack of time: {named}.")
    if config:
        sentences += batch_sentences(config, chosen)
    elif chosen.batch_size != reference.batch_size:
        sentences.append("The batch also changes what is learned: find its learning rate.")
    return Recommendation(choice, tuple(sentences), knobs, noise)
