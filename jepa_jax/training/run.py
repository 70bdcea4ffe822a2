"""Training from a config to a summary."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jepa_jax.base.console import Console, QuietConsole
from jepa_jax.base.errors import Diverged, UserError
from jepa_jax.base.files import write_json
from jepa_jax.base.signals import Interrupted, signals_raise
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import spec_to_json
from jepa_jax.data.pictures import save_views
from jepa_jax.program.checksums import newest_whole
from jepa_jax.program.identity import check_identities, check_parts
from jepa_jax.program.mirror import Mirror
from jepa_jax.program.workdir import Workdir
from jepa_jax.runtime.gpus import list_gpus
from jepa_jax.runtime.memory import is_out_of_memory
from jepa_jax.runtime.mesh import mesh_warnings
from jepa_jax.runtime.peers import fail_all, is_first
from jepa_jax.runtime.provenance import environment, unused_gpu
from jepa_jax.training.loop import train_loop
from jepa_jax.training.setup import NO_HOOKS, Hooks, Run, prepare


def train(
    config: Config,
    workdir: str | pathlib.Path,
    *,
    resume: str = "auto",
    allow_changed: Sequence[str] = (),
    console: Console | None = None,
    hooks: Hooks = NO_HOOKS,
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """See `jepa_jax.train`; `hooks` are what to do besides training, and by default only warnings are shown.

    Raises:
      UserError: something to fix. A run that is refused creates no folder.
      Diverged: the loss became NaN or infinite, or (Collapsed) all features became alike.
      Interrupted: SIGINT or SIGTERM; the last step is in a checkpoint.
    """
    folder, console = Workdir(workdir), console or QuietConsole()
    check_parts(allow_changed)
    early = "auto" if config.train.mirror and resume == "must" else resume  # its checkpoint may have to be fetched
    folder.check(config.to_dict(), early, allow_changed)
    summary = folder.read_summary()
    if summary and summary["status"] == "finished" and not folder.is_longer(config.to_dict()):
        console.line(
            f"{folder.path}: finished already; nothing to do. Another --workdir trains anew, and "
            f"--config.model.init_from={folder.path} there starts from these weights"
        )
        warn_of_damage(folder, console)
        if not folder.report.exists():
            hooks.write_report(folder.path)
        return summary
    with contextlib.ExitStack() as stack:
        with signals_raise(), fail_all():
            run = prepare(config, folder, console, hooks, data)
            stack.enter_context(hold(run, resume, allow_changed))
            start_folder(run)
        with fail_all(Interrupted, Diverged), explaining_out_of_memory(run):
            return train_loop(run)


def warn_of_damage(folder: Workdir, console: Console) -> None:
    """Warns of damaged checkpoints of a run that has finished and reads none."""
    for verdict in (verdict for path in folder.checkpoint_folders() for verdict in newest_whole(path)[1]):
        fix = f"remove {folder.summary} and start again: it trains from the newest whole checkpoint"
        console.warn(f"{verdict.in_words()}; {fix}")


@contextlib.contextmanager
def explaining_out_of_memory(run: Run) -> Iterator[None]:
    """Turns the error of a device without memory into one that says what to change."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        advice = run.hooks.explain_out_of_memory(run.config, run.program, run.facts, run.console)
        general = "memory is used up; use a smaller batch, config.train.remat=full or more config.train.accum_steps"
        raise UserError(advice or f"config.data.batch_size = {run.config.data.batch_size}: {general}") from error


@contextlib.contextmanager
def hold(run: Run, resume: str, allowed: Sequence[str]) -> Iterator[None]:
    """Creates the folder of a run and keeps other runs out of it; the first process does so for all."""
    if not is_first():
        yield
        return
    run.folder.create()
    with run.folder.held(), mirrored(run):
        run.folder.check(run.config.to_dict(), resume, allowed)  # again: another run may have ended here meanwhile
        for note in check_identities(run.folder.every_checkpoint(), run.identity, allowed):
            run.console.warn(note)
        yield


@contextlib.contextmanager
def mirrored(run: Run) -> Iterator[None]:
    """Fetches the run from its mirror if there is no checkpoint here, and copies it there inside the block."""
    if not run.config.train.mirror:
        yield
        return
    mirror = Mirror(run.config.train.mirror, run.folder, run.console.warn)
    if not run.folder.has_checkpoint() and (fetched := mirror.fetch()):
        run.console.line(f"fetched {fetched} from {mirror.url}")
    with mirror:
        yield


def start_folder(run: Run) -> None:
    """Says what the run is, and writes its config, its environment and a picture of what the method sees."""
    for line in (*run.in_words(), *run.cost.in_words()):
        run.console.line(line)
    if run.evaluation.note:
        run.console.warn(run.evaluation.note)
    if caveat := getattr(run.sources[0], "caveat", ""):
        run.console.warn(caveat)
    for warning in machine_warnings(run.config, jax.default_backend()):
        run.console.warn(warning)
    run.console.start("starting", None)  # compiles the initial weights and pictures of the views
    if unused := unused_gpu():
        run.console.warn(unused)
    for warning in mesh_warnings(run.program.mesh, len(list_gpus())):
        run.console.warn(warning)
    if not run.folder.has_checkpoint():  # a resumed run has the same ones
        for warning in run.warnings:
            run.console.warn(warning)
    if not is_first():
        return
    run.folder.create()
    if (run.folder.read_summary() or {}).get("status") == "finished":
        run.folder.summary.unlink()  # of a shorter run: beside the new config it would say that all is done
    write_json(run.folder.config, run.config.to_dict())
    write_json(run.folder.environment, environment())
    write_json(run.folder.elements, spec_to_json(run.sources[0].spec))
    if run.folder.views.exists():
        return
    pictured = run.some_elements(0)
    views = jax.jit(run.program.method.example_views)(pictured, jax.random.key(0))
    if views is not None:
        augment = run.config.data.augment
        save_views(run.folder.views, pictured["image"], np.asarray(views), augment.mean, augment.std)


def machine_warnings(config: Config, platform: str) -> Iterator[str]:
    """Yields what does not suit this machine, though it works."""
    data = config.data
    if data.pipeline == "grain" and data.workers < data.num_workers:
        yield f"config.data.num_workers = {data.num_workers}: {data.workers} are started, two per core; use auto"
    if config.train.precision == "bfloat16" and platform == "cpu":
        yield "config.train.precision = bfloat16: slower than float32 on most CPUs; compare them by jepa-jax sweep"
