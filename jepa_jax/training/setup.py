"""Prepares a run: opens its data and builds its program, so that what is wrong is known before anything is written."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jepa_jax.base.console import Console, QuietConsole
from jepa_jax.base.text import first_of
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import Cropping, Grouped, Source, element_names, sample
from jepa_jax.data.facts import DataFacts
from jepa_jax.data.photos.crops import batch_spec
from jepa_jax.data.pipeline import TrainBatches, abstract_on, check_pipeline, train_batches
from jepa_jax.data.sources import open_data
from jepa_jax.evals.evaluators import EvaluationContext, Evaluator, build_evaluators
from jepa_jax.evals.features import fingerprint
from jepa_jax.methods.whole_batch import accumulates_exactly
from jepa_jax.models.remat import NONE, noted_remat
from jepa_jax.program.build import Length, Program, build_program, initial_sample
from jepa_jax.program.dead_parameters import dead_parameters, in_words
from jepa_jax.program.describe import count, fixed_parameters
from jepa_jax.program.optim import path_of
from jepa_jax.program.step import TrainState
from jepa_jax.program.workdir import Workdir
from jepa_jax.runtime.mesh import batch_sharding, check_batch
from jepa_jax.runtime.peers import check_same, is_first
from jepa_jax.runtime.provenance import code_version
from jepa_jax.runtime.start import setup
from jepa_jax.training.best import Choice, find_choice
from jepa_jax.training.cost import Cost, limit_evaluation, run_cost
from jepa_jax.training.sinks import check_sinks

PICTURED = 8  # elements of a split that pictures show


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What higher layers add to a run; by default nothing.

    Attributes:
      explain_out_of_memory: called when memory ran out; returns what to tell the user, or "" for general advice.
      write_report: called with the folder of a run when it ends, for whatever reason.
    """

    explain_out_of_memory: Callable[[Config, Program, DataFacts, Console], str] = lambda *_: ""
    write_report: Callable[[pathlib.Path], object] = lambda *_: None


NO_HOOKS = Hooks()


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained, on which data, and where it is kept."""

    config: Config
    folder: Workdir
    program: Program
    sources: tuple[Source, Source]  # train and test split
    validation: Source | None  # held out of the train split
    data_identity: Mapping[str, Any]  # what distinguishes train and test split from others
    sample: Mapping[str, np.ndarray]  # a batch that the method may use to initialise itself
    evaluation: EvaluationContext
    evaluators: Mapping[str, Evaluator]
    cost: Cost
    choice: Choice | None  # what `train.keep_best` names
    warnings: Sequence[str]  # what tracing the step has shown
    console: Console
    hooks: Hooks

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What checkpoints say that the run was made with, by part; see `program.identity`."""
        return {"config": self.config.to_dict(), "data": self.data_identity, "code": code_version(self.config)}

    @property
    def facts(self) -> DataFacts:
        return DataFacts.of(self.sources[0])

    @property
    def length(self) -> Length:
        return self.program.length

    def initial_state(self) -> TrainState:
        return self.program.factory.create(self.config.train.seed, self.sample)

    def some_elements(self, split: int) -> dict[str, np.ndarray]:
        """Returns the elements of a split (0 = train, 1 = test) that pictures show."""
        source = self.sources[split]
        chosen = sample(len(source), PICTURED)
        elements = source.batch(chosen)
        shown = {name: elements[name] for name in source.spec}
        if self.config.loader_crops and isinstance(source, Cropping):
            crops = source.cropped(self.config.loader_crops, self.config.train.seed, 0)
            shown |= {name: array for name, array in crops.batch(chosen).items() if name in crops.spec}
        return shown

    def batches(self, start_step: int, state: dict[str, Any] | None = None) -> TrainBatches:
        """Returns the training batches from a step on; nothing is loaded before the first one is asked for."""
        return train_batches(
            self.config.data,
            self.sources[0],
            seed=self.config.train.seed,
            sharding=batch_sharding(self.program.mesh),
            start_step=start_step,
            state=state,
            crops=self.config.loader_crops,
            warn=self.console.warn,
        )

    def in_words(self) -> list[str]:
        """Returns lines that say what this run is."""
        config, length, state = self.config, self.length, self.program.factory.abstract
        trainable, own = count(state.params["model"]), state.params["model"].get("encoder", {})
        total = trainable + count(state.target) + fixed_parameters(self.program)
        name = f"encoder  {config.model.name}:" if config.model.name else "model   "
        alone = f"{count(own):,} parameters; whole model " if count(own) not in (0, total) else ""
        epochs = length.total_steps / length.steps_per_epoch
        unit = "epoch" if epochs == 1 else "epochs"
        devices = jax.devices()
        processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
        train, test = self.sources
        elements, groups = element_names(train)
        counts = [len(np.unique(source.groups)) for source in self.sources if groups and isinstance(source, Grouped)]
        if counts and counts[0] < len(train):
            elements = f"{elements} of {' and '.join(f'{number:,}' for number in counts)} {groups}"
        drawn = " (one in ten, always the same)" if getattr(test, "divided", False) else ""
        held_out = drawn + (f", {len(self.validation):,} held out" if self.validation else "")
        labels = held_out + (f", {len(train.classes)} classes" if train.classes else ", no labels")
        return [
            f"method   {config.method.name}",
            f"{name} {alone}{total:,} parameters" + (f", {trainable:,} trainable" if trainable < total else ""),
            f"length   {length.total_steps:,} steps, {epochs:.3g} {unit} of {length.steps_per_epoch:,} steps",
            f"devices  {self.program.mesh.size} of {len(devices)} x {devices[0].device_kind}{processes}",
            f"data     {config.data.source}: {len(train):,} train and {len(test):,} test {elements}{labels}",
            *(f"weights  {note}" for note in self.program.factory.pretrained().notes),
        ]


def prepare(
    config: Config, folder: Workdir, console: Console, hooks: Hooks, data: Mapping[str, Any] | None = None
) -> Run:
    """Opens the data (or takes what is given) and builds the program of a run; writes and compiles nothing."""
    check_sinks(config)
    mesh = setup(config)
    console = console if is_first() else QuietConsole()  # one of several processes speaks for all
    check_batch(config, mesh)
    train, test, validation = open_data(config.data, data)
    sources, sample = (train, test), initial_sample(train)
    data_identity = {name: fingerprint(source) for name, source in zip(("train", "test"), sources, strict=True)}
    check_same("code", code_version(config))
    check_same("data", data_identity)
    size: dict[str, Any] = {"num_train": len(train), "num_classes": len(train.classes)}
    program = build_program(config, **size, sample=sample, mesh=mesh)
    check_pipeline(config.data, train, batch_sharding(mesh), config.loader_crops)
    program.factory.pretrained()  # raises if the weights cannot be read or do not fit
    evaluation = EvaluationContext(config, program, (train, test), validation=validation)
    evaluators = build_evaluators(evaluation)
    choice = find_choice(config, evaluators, program.length)
    warnings = step_warnings(config, program, train)  # first: it looks at the trace, which is made once
    cost = limit_evaluation(evaluation, run_cost(config, program, sources, evaluators), evaluators)
    return Run(
        config, folder, program, sources, validation, data_identity, sample, evaluation, evaluators, cost, choice,
        warnings, console, hooks,
    )  # fmt: skip


def step_warnings(config: Config, program: Program, source: Source) -> list[str]:
    """Traces the step, which raises what is wrong with a method's loss; returns what is odd about it."""
    with noted_remat([]) as noted:
        batch = abstract_on(program.mesh, batch_spec(config, source.spec), config.data.batch_size)
        dead = dead_parameters(program, batch)
    warnings = [in_words(dead)] if dead else []
    if config.train.remat != NONE and not noted:
        ignored = f"{config.model.name or config.method.name} ignores it, so nothing is recomputed"
        warnings.append(f"config.train.remat = {config.train.remat}: {ignored}; use none")
    if config.train.accum_steps > 1 and (norms := norms_of_parts(config, program)):
        part = config.data.batch_size // config.train.accum_steps
        seen = f"batch norm ({first_of(norms, 1)}) sees {part:,} of {config.data.batch_size:,} elements at a time"
        warnings.append(f"config.train.accum_steps = {config.train.accum_steps}: {seen}: a smaller batch to it")
    return warnings


def norms_of_parts(config: Config, program: Program) -> list[str]:
    """Returns the paths of the batch norms that see one part of a batch at a time."""
    method = program.method
    whole = method.heads_of_batch if accumulates_exactly(method, config) else ()
    leaves = jax.tree_util.tree_flatten_with_path(program.factory.abstract.stats)[0]
    paths = [path_of(path) for path, _ in leaves]
    return [path.removesuffix("/var") for path in paths if path.endswith("/var") and path.split("/")[0] not in whole]
