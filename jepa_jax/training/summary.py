"""The summary of a run: its status, its final figures, and what it has used."""

import contextlib
import pathlib
from typing import Any

from jepa_jax.base.files import write_json
from jepa_jax.evals.evaluators import summary_fields
from jepa_jax.profiling.speed import peak_memory_bytes
from jepa_jax.program.checksums import step_folders
from jepa_jax.runtime.peers import is_first
from jepa_jax.training.progress import Loop
from jepa_jax.training.recorder import Recorder
from jepa_jax.training.setup import Run


def write_summary(run: Run, recorder: Recorder, loop: Loop, status: str, **more: Any) -> dict[str, Any]:
    """Writes summary, profile and report of a run, finished or not; returns the summary."""
    run.console.stop()
    progress, config = loop.progress, run.config
    progress.share_skipped()
    measured = [figure for figures in progress.untrained.values() for figure in figures.items()]
    summary = {
        "status": status,
        **({"init_from": config.init_from} if config.init_from else {}),
        **summary_fields(config, run.evaluators, progress.warnings, finished=status == "finished"),
        **{name: value for name, value in measured if name.startswith("untrained_")},
        "images_per_sec": recorder.images_per_sec(progress),
        **recorder.totals(),
        "steps": loop.step,
        "epochs": loop.step / run.length.steps_per_epoch,
        "peak_memory_bytes": peak_memory_bytes(),
        "checkpoint_bytes": checkpoint_bytes(run.folder.checkpoints),
        "compilations": recorder.train_step.count,
        "evaluation_note": run.evaluation.note,
        "failed_evaluators": progress.failed,
        "skipped_images": len(progress.skipped_images),
        "host_seconds": recorder.timeline.seconds(),
        "num_classes": len(run.sources[0].classes),
        "data_identity": dict(run.data_identity),
        **progress.choice(config.train.keep_best),
        **more,
    }
    recorder.close_epoch(loop.step)  # a run that did not get to the end of one
    if is_first():
        run.folder.check_still_there()
        with recorder.optional(run.folder.profile):
            recorder.profiler.write(run.folder.profile, at_end=True)
        # A run that has finished must have a summary: without one it counts as unfinished.
        with contextlib.nullcontext() if status == "finished" else recorder.optional(run.folder.summary):
            write_json(run.folder.summary, summary)
        with recorder.optional(run.folder.report):
            run.hooks.write_report(run.folder.path)
    return summary


def checkpoint_bytes(directory: pathlib.Path) -> int | None:
    """Returns the size of the newest checkpoint; None if there is none, or if it is being replaced."""
    newest = next((folder for _, folder in step_folders(directory)), None)
    if newest is not None:
        with contextlib.suppress(OSError):
            return sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    return None
