"""What happens between steps: evaluation, pictures, checkpoints and recordings. Each action knows when it is due."""

import functools
import io
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jepa_jax.base.errors import Collapsed
from jepa_jax.base.files import write_atomically
from jepa_jax.data.pictures import png, view_grid
from jepa_jax.evals.evaluators import EvaluationContext, Evaluator, Figures, Moment, Stage, build_evaluators
from jepa_jax.profiling.sections import Section
from jepa_jax.program.step import evaluated_variables
from jepa_jax.runtime.peers import is_first
from jepa_jax.training.best import Choice, find_choice, judge
from jepa_jax.training.progress import Loop
from jepa_jax.training.session import Session
from jepa_jax.training.setup import Run


class Action:
    """Something that happens between two steps, while the device is idle.

    Attributes:
      name: under which a checkpoint remembers that it was done; "" if it need not be made up for.
    """

    name = ""

    def __init__(self, run: Run, session: Session):
        self._run, self._session = run, session

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

    Where it measures the figure that `choice` names, it also keeps the best state and ends the patience of the run.
    """

    def __init__(
        self,
        run: Run,
        session: Session,
        name: str,
        evaluator: Evaluator,
        choice: Choice | None,
    ):
        super().__init__(run, session)
        self.name, self._evaluator = name, evaluator
        self._choice = choice if choice and choice.evaluator == name else None

    def due(self, step: int) -> bool:
        return (step == 0 or self._ends_epoch(step)) and self._evaluator.due(self._moment(step))

    def _moment(self, step: int) -> Moment:
        return Moment(Stage.EPOCH if step else Stage.UNTRAINED, step, step // self._run.length.steps_per_epoch)

    def run(self, loop: Loop) -> None:
        figures, length, untrained = (
            self._measure(loop, self._moment(loop.step)),
            self._run.length,
            loop.progress.untrained,
        )
        if loop.step == 0:
            untrained[self.name] = figures
        if loop.step or self._evaluator.logs_untrained:
            self._session.log(loop.step, self._evaluator.group, figures)
        if words := self._evaluator.in_words(figures):
            epoch = f"epoch {loop.step // length.steps_per_epoch}/{length.total_steps / length.steps_per_epoch:g}"
            fresh = "as loaded:" if getattr(self._run.config.model, "init_from", "") else "untrained:"
            begin = [epoch, self._session.in_words()] if loop.step else [fresh]
            self._run.console.line("  ".join([*filter(None, begin), words]))
        if loop.step:
            self._warn(loop, self._evaluator.warning(figures, untrained.get(self.name)))
        if loop.step and self._choice and self._choice.figure in figures:
            self._choose(loop, self._choice, figures[self._choice.figure])

    def _choose(self, loop: Loop, choice: Choice, value: Any) -> None:
        epoch, before = loop.step // self._run.length.steps_per_epoch, loop.progress.best
        if judge(self._run.config.train, choice, loop, value, epoch):
            loop.progress.done[self.name] = loop.step  # a run that resumes from here must not judge it again
            if not self._session.save_best(loop, self._evaluator.context.evaluated_statistics):
                loop.progress.best = before
        if loop.progress.stopped:
            self._run.console.line(f"step {loop.step}: stopped early: {loop.progress.stopped}")

    def _warn(self, loop: Loop, warning: str | None) -> None:
        loop.progress.warnings[self.name] = warning
        if warning and self._run.config.train.stop_on_collapse:
            raise Collapsed(f"step {loop.step}: {warning}")
        if warning:
            self._run.console.warn(f"step {loop.step}: {warning}")

    def final(self, loop: Loop) -> Figures:
        """Returns the figures of the trained model, for the summary."""
        moment = Moment(Stage.FINAL, loop.step, loop.step // self._run.length.steps_per_epoch)
        if not self._evaluator.due(moment):
            return {}
        figures = self._measure(loop, moment)
        measured = {name: value for name, value in figures.items() if isinstance(value, float)}
        self._session.log(loop.step, self._evaluator.group, measured)
        if words := self._evaluator.in_words(figures):
            self._run.console.line(f"trained:  {words}")
        if caveat := self._evaluator.caveat(figures):
            self._run.console.warn(caveat)
        if (exhibits := self._evaluator.exhibits()) and is_first():
            content = io.BytesIO()
            np.savez_compressed(content, allow_pickle=False, **exhibits)
            with self._session.optional(self._run.folder.exhibits):
                self._run.folder.exhibits.mkdir(exist_ok=True)
                write_atomically(self._run.folder.exhibits / f"{self.name}.npz", content.getvalue())
        return figures

    def _measure(self, loop: Loop, moment: Moment) -> Figures:
        with self._session.timeline.section(Section.VALIDATION):
            figures = self._evaluator.run(loop.state, moment)
        self._session.show_training(loop)  # its bar, after that of the evaluator
        return figures


class DrawPictures(Action):
    """Draws what the model makes of some test images, as PNG and for the sinks that show images."""

    name = "pictures"

    def __init__(self, run: Run, session: Session):
        super().__init__(run, session)
        self._batch = run.some_elements(1)
        self._draw = jax.jit(self._pictures)

    def _pictures(self, params: Any, stats: Any, batch: Any) -> Any:
        method, factory = self._run.program.method, self._run.program.factory
        return method.pictures(factory.merge(params, stats), batch, jax.random.key(0))

    @functools.cached_property
    def _possible(self) -> bool:
        """Whether the method draws pictures."""
        state = self._run.program.factory.abstract
        return jax.eval_shape(self._pictures, state.params["model"], state.stats, self._batch) is not None

    def due(self, step: int) -> bool:
        every = self._run.length.steps_per_epoch * self._run.config.log.pictures_every_epochs
        return every > 0 and self._ends_epoch(step) and (step % every == 0 or self._is_last(step)) and self._possible

    def run(self, loop: Loop) -> None:
        augment = self._run.config.data.augment
        with self._session.timeline.section(Section.VISUALIZATION):
            variables = evaluated_variables(loop.state, self._run.config.eval.weights)
            image = view_grid(np.asarray(self._draw(*variables, self._batch)), augment.mean, augment.std)
            if is_first():
                with self._session.optional(self._run.folder.pictures):
                    self._run.folder.pictures.mkdir(exist_ok=True)
                    write_atomically(self._run.folder.pictures / f"step_{loop.step:08d}.png", png(image))
            self._session.draw(loop.step, "pictures", image)


class SaveCheckpoint(Action):
    """Saves a checkpoint; that of the last step is saved by the end of the run."""

    def __init__(self, run: Run, session: Session, context: EvaluationContext):
        super().__init__(run, session)
        self._context = context

    def due(self, step: int) -> bool:
        every = self._run.config.train.checkpoint_every_steps
        return (step % every == 0 if every else self._ends_epoch(step)) and not self._is_last(step)

    def run(self, loop: Loop) -> None:
        self._session.save(loop, self._context.evaluated_statistics)


class CloseEpoch(Action):
    """Closes the profiler's account of an epoch."""

    def due(self, step: int) -> bool:
        return self._ends_epoch(step) or self._is_last(step)

    def run(self, loop: Loop) -> None:
        self._session.close_epoch(loop.step)


class Record(Action):
    """Starts and ends the profiler's short recordings, and ends the trace that the user asked for."""

    def due(self, step: int) -> bool:
        return self._session.profiler.must_drain(step) or self._session.trace.ends_at(step)

    def run(self, loop: Loop) -> None:
        with self._session.timeline.section(Section.PROFILER):
            if self._session.trace.ends_at(loop.step):
                self._session.close_trace()
                self._run.console.line(self._session.trace.how_to_open())
            if self._session.profiler.must_drain(loop.step):
                self._session.profiler.record(loop.step)


class Actions:
    """The actions of a run, in the order in which they act."""

    def __init__(self, run: Run, session: Session, loop: Loop):
        self._session = session
        on_skipped = functools.partial(session.note_skipped, loop)
        self.context = EvaluationContext(
            run.config,
            run.program,
            run.sources,
            validation=run.validation,
            progress=session,
            on_skipped=on_skipped,
        )
        evaluators = build_evaluators(self.context)
        choice = find_choice(run.config.train, evaluators, run.length)
        self._evaluations = [Evaluate(run, session, name, one, choice) for name, one in evaluators.items()]
        self._save = SaveCheckpoint(run, session, self.context)
        last = [DrawPictures(run, session), self._save, CloseEpoch(run, session)]
        self._all: list[Action] = [Record(run, session), *self._evaluations, *last]

    def due(self, step: int) -> list[Action]:
        """Returns the actions to run after this many steps."""
        return [action for action in self._all if action.due(step)]

    def pending(self, loop: Loop) -> list[Action]:
        """Returns what is due before the next step: a run that starts, or a signal that came before it was done."""
        return [
            action for action in self.due(loop.step) if action.name and loop.progress.done.get(action.name) != loop.step
        ]

    def run(self, actions: Sequence[Action], loop: Loop) -> None:
        """Runs actions in order until the run is interrupted; between steps, host and device may exchange data."""
        with jax.transfer_guard("allow"):
            for action in actions:
                self._session.agree_on_signals()
                action.run(loop)
                if action.name:
                    loop.progress.done[action.name] = loop.step
        self.context.forget()

    def save(self, loop: Loop) -> None:
        """Saves a checkpoint of this step, unless there is one."""
        self._save.run(loop)

    def final(self, loop: Loop) -> Figures:
        """Returns the figures of all evaluators of the trained model."""
        return functools.reduce(lambda all, evaluate: all | evaluate.final(loop), self._evaluations, {})
