"""What happens between steps: evaluation, pictures, checkpoints and recordings. Each action knows when it is due."""

import contextlib
import functools
import io
import pathlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.base.errors import Collapsed, DataLost, Diverged
from jepa_jax.base.files import write_atomically
from jepa_jax.data.pictures import png, view_grid
from jepa_jax.data.reading import PatientReader, Read
from jepa_jax.evals.evaluators import Evaluator, Figures, Moment, Stage, checked_figures, moment_after
from jepa_jax.profiling.sections import Section
from jepa_jax.program.step import evaluated_variables
from jepa_jax.runtime.peers import is_first
from jepa_jax.training.best import Choice, judge
from jepa_jax.training.progress import Loop
from jepa_jax.training.recorder import Recorder
from jepa_jax.training.saver import Saver
from jepa_jax.training.setup import Run
from jepa_jax.training.signals import StopSignals


class Action:
    """Something that happens between two steps, while the device is idle.

    Attributes:
      name: under which a checkpoint remembers that it was done; empty if it is not repeated after a restart.
    """

    name = ""

    def __init__(self, run: Run, recorder: Recorder, saver: Saver):
        self._run, self._recorder, self._saver = run, recorder, saver

    def due(self, step: int) -> bool:
        """Returns whether to act after this many steps; 0 is before the first one."""
        raise NotImplementedError

    def run(self, loop: Loop) -> None:
        raise NotImplementedError

    def _ends_epoch(self, step: int) -> bool:
        return step > 0 and step % self._run.length.steps_per_epoch == 0

    def _is_last(self, step: int) -> bool:
        return step == self._run.length.total_steps


class Evaluate(Action):
    """Runs one evaluator before training and after epochs, logs its figures and acts on its warnings.

    If it measures the figure that `train.keep_best` names, it also keeps the best state and ends the run by
    `train.patience`.
    """

    def __init__(self, run: Run, recorder: Recorder, saver: Saver, name: str, evaluator: Evaluator):
        super().__init__(run, recorder, saver)
        self.name, self._evaluator = name, evaluator
        self._choice = run.choice if run.choice and run.choice.evaluator == name else None

    def due(self, step: int) -> bool:
        every = self._run.config.eval.every_steps
        may_be = step == 0 or self._ends_epoch(step) or (every > 0 and step % every == 0)
        return may_be and self._evaluator.due(moment_after(step, self._run.length.steps_per_epoch))

    def run(self, loop: Loop) -> None:
        figures: Figures = {}
        with self._reported(loop):
            figures = self._evaluate(loop)
        if loop.step and self._choice and self._choice.figure in figures:
            self._choose(loop, self._choice, figures[self._choice.figure])

    @contextlib.contextmanager
    def _reported(self, loop: Loop) -> Iterator[None]:
        """Saves the state and reports an exception of the evaluator, so that the run goes on."""
        try:
            yield
        except (DataLost, Diverged):
            raise
        except Exception as error:
            if jax.process_count() > 1:
                raise  # the others may wait for this process
            loop.progress.done[self.name] = loop.step  # a run that resumes from here does not fail again
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({pathlib.Path(place.filename).name}, line {place.lineno})"
            loop.progress.failed[self.name] = f"step {loop.step}: {reason}"
            if loop.step:
                self._saver.save(loop)
            self._recorder.show_training(loop)  # instead of the bar of the evaluator
            self._run.console.warn(f"step {loop.step}: the evaluator {self.name} failed, the run goes on: {reason}")

    def _evaluate(self, loop: Loop) -> Figures:
        figures = self._measure(loop, moment_after(loop.step, self._run.length.steps_per_epoch))
        untrained = loop.progress.untrained
        if loop.step == 0:
            untrained[self.name] = figures
        if loop.step or self._evaluator.logs_untrained:
            self._recorder.log(loop.step, self._evaluator.group, figures)
        words = self._evaluator.in_words(figures)
        if words and loop.step:
            self._recorder.found(loop.step, words)
        elif words:
            self._run.console.line(f"{'as loaded:' if self._run.config.init_from else 'untrained:'}  {words}")
        if not loop.step:
            return figures
        warning = loop.progress.warnings[self.name] = self._evaluator.warning(figures, untrained.get(self.name))
        if warning and self._run.config.train.stop_on_collapse:
            raise Collapsed(f"step {loop.step}: {warning}")
        if warning:
            self._run.console.warn(f"step {loop.step}: {warning}")
        return figures

    def _choose(self, loop: Loop, choice: Choice, value: Any) -> None:
        epoch, before = loop.step // self._run.length.steps_per_epoch, loop.progress.best
        if judge(self._run.config.train, choice, loop, value, epoch):
            loop.progress.done[self.name] = loop.step  # a run that resumes from here must not judge it again
            if not self._saver.save_best(loop):
                loop.progress.best = before
        if loop.progress.stopped:
            self._run.console.line(f"step {loop.step}: stopped early: {loop.progress.stopped}")

    def final(self, loop: Loop) -> Figures:
        moment = Moment(Stage.FINAL, loop.step, loop.step // self._run.length.steps_per_epoch)
        figures: Figures = {}
        if self._evaluator.due(moment):
            with self._reported(loop):
                figures = self._finish(loop, moment)
        return figures

    def _finish(self, loop: Loop, moment: Moment) -> Figures:
        figures = self._measure(loop, moment)
        measured = {name: value for name, value in figures.items() if isinstance(value, float)}
        self._recorder.log(loop.step, self._evaluator.group, measured)
        if words := self._evaluator.in_words(figures):
            self._run.console.line(f"trained:  {words}")
        if caveat := self._evaluator.caveat(figures):
            self._run.console.warn(caveat)
        if (exhibits := self._evaluator.exhibits()) and is_first():
            content = io.BytesIO()
            np.savez_compressed(content, allow_pickle=False, **exhibits)
            with self._recorder.optional(self._run.folder.exhibits):
                self._run.folder.exhibits.mkdir(exist_ok=True)
                write_atomically(self._run.folder.exhibits / f"{self.name}.npz", content.getvalue())
        return figures

    def _measure(self, loop: Loop, moment: Moment) -> Figures:
        with self._recorder.timeline.section(Section.VALIDATION):
            figures = self._evaluator.run(loop.state, moment)
            figures = checked_figures(self.name, figures, final=moment.stage != Stage.EPOCH)
        self._recorder.show_training(loop)  # instead of the bar of the evaluator
        return figures


class EvaluationProgress:
    """Shows the progress bar of an evaluator; a signal ends the evaluation."""

    def __init__(self, console: Console, signals: StopSignals):
        self._console, self._signals = console, signals

    def start(self, what: str, total: int, /) -> None:
        self._signals.agree()
        self._console.start(what, total)

    def advance(self, amount: int, /) -> None:
        self._console.advance(amount)
        self._signals.check()


def make_evaluations(run: Run, recorder: Recorder, saver: Saver, signals: StopSignals, loop: Loop) -> list[Evaluate]:
    """Returns an action for each evaluator of a run; a signal, or data that hang, ends an evaluation."""
    reader = PatientReader(run.config.data.worker_timeout, signals.check)

    def read_and_note(read: Read) -> dict[str, Any]:
        batch = reader(read)
        recorder.note_skipped(loop, batch.get("skipped", ()))
        return batch

    run.evaluation.progress, run.evaluation.reader = EvaluationProgress(run.console, signals), read_and_note
    return [Evaluate(run, recorder, saver, name, evaluator) for name, evaluator in run.evaluators.items()]


class DrawPictures(Action):
    """Draws what the model makes of some test images, as PNG and for the sinks that show images."""

    name = "pictures"

    def __init__(self, run: Run, recorder: Recorder, saver: Saver):
        super().__init__(run, recorder, saver)
        self._batch = run.some_elements(1)
        self._draw = jax.jit(self._pictures)

    def _pictures(self, params: Any, stats: Any, batch: Any) -> Any:
        method, factory = self._run.program.method, self._run.program.factory
        return method.pictures(factory.merge(params, stats), batch, jax.random.key(0))

    @functools.cached_property
    def _possible(self) -> bool:
        state = self._run.program.factory.abstract
        return jax.eval_shape(self._pictures, state.params["model"], state.stats, self._batch) is not None

    def due(self, step: int) -> bool:
        every = self._run.length.steps_per_epoch * self._run.config.log.pictures_every_epochs
        return every > 0 and self._ends_epoch(step) and (step % every == 0 or self._is_last(step)) and self._possible

    def run(self, loop: Loop) -> None:
        augment = self._run.config.data.augment
        with self._recorder.timeline.section(Section.VISUALIZATION):
            variables = evaluated_variables(loop.state, self._run.config.eval.weights)
            image = view_grid(np.asarray(self._draw(*variables, self._batch)), augment.mean, augment.std)
            if is_first():
                with self._recorder.optional(self._run.folder.pictures):
                    self._run.folder.pictures.mkdir(exist_ok=True)
                    write_atomically(self._run.folder.pictures / f"step_{loop.step:08d}.png", png(image))
            self._recorder.draw(loop.step, "pictures", image)


class SaveCheckpoint(Action):
    """Saves a checkpoint; that of the last step is saved by the end of the run."""

    def due(self, step: int) -> bool:
        config = self._run.config.train
        every = config.checkpoint_every_steps or config.checkpoint_every_epochs * self._run.length.steps_per_epoch
        return step > 0 and step % every == 0 and not self._is_last(step)

    def run(self, loop: Loop) -> None:
        self._saver.save(loop)


class CloseEpoch(Action):
    """Closes the profiler's account of an epoch."""

    def due(self, step: int) -> bool:
        return self._ends_epoch(step) or self._is_last(step)

    def run(self, loop: Loop) -> None:
        self._recorder.close_epoch(loop.step)


class Record(Action):
    """Starts and ends the profiler's short recordings, and ends the trace that the user asked for."""

    def due(self, step: int) -> bool:
        return self._recorder.profiler.must_drain(step) or self._recorder.trace.ends_at(step)

    def run(self, loop: Loop) -> None:
        with self._recorder.timeline.section(Section.PROFILER):
            if self._recorder.trace.ends_at(loop.step):
                self._recorder.close_trace()
                self._run.console.line(self._recorder.trace.how_to_open())
            if self._recorder.profiler.must_drain(loop.step):
                self._recorder.profiler.record(loop.step)


class Actions:
    """The actions of a run, in the order in which they act."""

    def __init__(self, *actions: Action):
        self._all = actions

    def due(self, step: int) -> list[Action]:
        return [action for action in self._all if action.due(step)]

    def pending(self, loop: Loop) -> list[Action]:
        """Returns what is due before the next step: at the start of a run, or if a signal came before it was done."""
        return [
            action for action in self.due(loop.step) if action.name and loop.progress.done.get(action.name) != loop.step
        ]

    def run(self, actions: Sequence[Action], run: Run, loop: Loop, signals: StopSignals) -> None:
        """Runs actions in order until the run is interrupted; between steps, host and device may exchange data."""
        with jax.transfer_guard("allow"):
            for action in actions:
                signals.agree()
                action.run(loop)
                if action.name:
                    loop.progress.done[action.name] = loop.step
        run.evaluation.forget()
