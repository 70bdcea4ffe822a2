"""Checkpoints of a run: the newest ones, and the best one if `train.keep_best` asks for it."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import disk_reason
from jepa_jax.profiling.sections import Section
from jepa_jax.program.checkpoint import Checkpoints, no_whole_checkpoint
from jepa_jax.program.step import TrainState
from jepa_jax.training.progress import Loop, Progress
from jepa_jax.training.recorder import Recorder
from jepa_jax.training.setup import Run


class Saver(contextlib.ExitStack):
    """Saves and restores the loop; writing goes on in the background until the end of the `with` block."""

    def __init__(self, run: Run, recorder: Recorder):
        super().__init__()
        self._run, self._recorder = run, recorder
        options: dict[str, Any] = {"warn": run.console.warn, "identity": run.identity}
        self.newest = Checkpoints(run.folder.checkpoints, run.config.train.checkpoint_keep, **options)
        self._best = Checkpoints(run.folder.best, **options) if run.config.train.keep_best else None
        self._opened = [checkpoints for checkpoints in (self.newest, self._best) if checkpoints]

    def __enter__(self) -> Self:
        for checkpoints in self._opened:
            self.enter_context(checkpoints)
        return self

    def restore_or(self, initial_state: Callable[[], TrainState]) -> Loop:
        """Returns the position of the newest checkpoint, or the start of the run."""
        # A process that was killed may have left no checkpoint newer than the best one. On a tie prefer checkpoints/,
        # which is saved later.
        saved = [checkpoints for checkpoints in self._opened if checkpoints.latest_step() is not None]
        if saved:
            return self._restore(max(saved, key=lambda checkpoints: checkpoints.latest_step() or 0))
        if any(checkpoints.all_damaged for checkpoints in self._opened):
            raise no_whole_checkpoint(self._opened)
        return Loop(0, initial_state(), Progress())

    def _restore(self, checkpoints: Checkpoints) -> Loop:
        """Returns the position of a checkpoint, and renames damaged ones so that later saves do not meet them."""
        run = self._run
        state, stored = checkpoints.restore(run.program.factory.abstract)
        for checkpoints in self._opened:
            checkpoints.set_aside_damaged()
        loop = Loop(stored["step"], state, Progress.of(stored))
        run.console.line(f"resumed at step {loop.step} of {run.length.total_steps} in {run.folder.path}")
        if self._best and loop.progress.best and self._best.latest_step() is None:
            run.console.warn("the best state was damaged and is lost; the choice begins again at this step")
            loop.progress.best = None
        return loop

    def save(self, loop: Loop) -> None:
        """Saves a checkpoint of this step, unless there is one; the writing goes on in the background."""
        self._run.folder.check_still_there()
        if loop.step != self.newest.latest_step():
            self._save(self.newest, loop)

    def save_best(self, loop: Loop) -> bool:
        """Replaces the best state so far and waits until it is on disk; returns whether that succeeded."""
        assert self._best is not None  # there is a figure to choose by
        self._run.folder.check_still_there()
        self._save(self._best, loop)
        with self._recorder.timeline.section(Section.CHECKPOINT):
            try:
                self._best.wait()
            except UserError as error:
                reason = disk_reason(error)
                self._run.console.warn(f"the best state could not be saved ({reason}); the one before remains")
                return False
        return True

    def _save(self, checkpoints: Checkpoints, loop: Loop) -> None:
        with self._recorder.timeline.section(Section.CHECKPOINT):
            loop.progress.images_per_sec = self._recorder.images_per_sec(loop.progress)
            loop.progress.share_skipped()
            stored = dataclasses.asdict(loop.progress) | self._recorder.totals() | {"step": loop.step}
            checkpoints.save(loop.step, loop.state, stored, self._evaluated_statistics(loop))

    def _evaluated_statistics(self, loop: Loop) -> Any:
        """Returns the statistics that evaluations read; None, with a warning, if the data for them cannot be read."""
        try:
            return self._run.evaluation.evaluated_statistics(loop.state)
        except (UserError, OSError) as error:
            if jax.process_count() > 1:
                raise  # the others wait for this process
            kept = "the checkpoint holds those of training, which evaluations of it then read"
            self._run.console.warn(f"step {loop.step}: no batch statistics for evaluations ({error}); {kept}")
            return None

    def wait(self) -> None:
        """Waits for the last checkpoint; raises UserError if it, or the folder of the run, could not be kept."""
        try:
            self.newest.wait()
        except UserError:
            self._run.folder.check_still_there()
            raise

    def in_words(self) -> str:
        """Returns which checkpoint on disk is the newest whole one; waits for one that is being written."""
        last = self.newest.whole_step()
        return "none yet" if last is None else f"step {last} in {self._run.folder.checkpoints}"

    def load_best(self, loop: Loop) -> None:
        """Replaces the state of a finished run by its best one, if it has chosen one."""
        best = loop.progress.best
        if self._best is None or best is None or best["step"] == loop.step:
            return
        with self._recorder.timeline.section(Section.CHECKPOINT):
            del loop.state  # frees its memory
            loop.state, _ = self._best.restore(self._run.program.factory.abstract)
