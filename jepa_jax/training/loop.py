"""The training loop: one for every method.

It dispatches step n before it reads the metrics of step n - 1, so that the device has work queued unless an action is
due. Actions (evaluation, pictures, checkpoint) run between steps, on a state that is known to be finite.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax

from jepa_jax.base.errors import DataLost, Diverged, UserError
from jepa_jax.base.signals import Interrupted
from jepa_jax.data.reading import PatientReader
from jepa_jax.profiling.compilations import CompiledStep
from jepa_jax.program.checkpoint import params_sha256
from jepa_jax.program.step import evaluated_variables
from jepa_jax.training.actions import Actions, CloseEpoch, DrawPictures, Record, SaveCheckpoint, make_evaluations
from jepa_jax.training.progress import Loop
from jepa_jax.training.recorder import Recorder
from jepa_jax.training.saver import Saver
from jepa_jax.training.setup import Run
from jepa_jax.training.signals import StopSignals
from jepa_jax.training.steps import Steps
from jepa_jax.training.summary import write_summary

LAST_READS_SECONDS = 3.0  # for all data that the last checkpoint of an interrupted run reads
MUST_BE_FINITE = ("loss", "grad_norm", "update_norm")  # of the metrics, or the run ends


def train_loop(run: Run) -> dict[str, Any]:
    """Trains from the newest checkpoint, or a new state, to the last step, then evaluates; returns the summary.

    What ends a run early, and what it leaves:
      a signal: a checkpoint of the last step and a summary; a signal during evaluations, too;
      data that can no longer be read: the same; in one of several processes only the message;
      a loss that is not finite, or a collapse: a summary, and the checkpoints before it;
      a checkpoint of the last step that cannot be written: the message alone.
    """
    train_step = CompiledStep(run.program.train_step, run.program.useful_step)
    with StopSignals(run.program.mesh) as signals, Recorder(run, train_step) as recorder, Saver(run, recorder) as saver:
        loop = saver.restore_or(run.initial_state)
        recorder.open(loop)
        steps = Steps(train_step, recorder.timeline, recorder.profiler.dispatched)
        evaluations = make_evaluations(run, recorder, saver, signals, loop)
        actions = Actions(
            Record(run, recorder, saver),
            *evaluations,
            DrawPictures(run, recorder, saver),
            SaveCheckpoint(run, recorder, saver),  # after the actions above: it stores which of them ran
            CloseEpoch(run, recorder, saver),  # writes to the profile alone; also due after the last step
        )
        try:
            try:  # the outer one also catches what saving the last step raises
                train_steps(run, loop, steps, actions, recorder, saver, signals)
                saver.save(loop)
                saver.wait()
                saver.load_best(loop)  # to evaluate; the saver does not save step `loop.step` a second time
                results = {name: value for one in evaluations for name, value in one.final(loop).items()}
            except (Interrupted, DataLost) as error:
                save_last_step(error, run, loop, steps, recorder, saver)
                raise
        except Interrupted as error:
            write_summary(run, recorder, loop, "interrupted")
            run.console.line(f"{error}: checkpoint of step {loop.step} written; the same command continues from there")
            raise
        except DataLost as error:
            write_summary(run, recorder, loop, "interrupted", reason=str(error))
            kept = f"checkpoint of step {loop.step} written: the same command continues from there"
            raise DataLost(f"{error}; {kept}") from error
        except Diverged as error:
            write_summary(run, recorder, loop, error.status, reason=str(error))
            raise
        digest = params_sha256(evaluated_variables(loop.state, "online")[0])
        return write_summary(run, recorder, loop, "finished", **results, params_sha256=digest)


def train_steps(
    run: Run, loop: Loop, steps: Steps, actions: Actions, recorder: Recorder, saver: Saver, signals: StopSignals
) -> None:
    """Takes the remaining steps, unless an evaluation ends them early, and runs the actions due between them.

    `signals` raises Interrupted where it is asked: while a batch is waited for, between actions and after each step.
    Several processes must stop at the same step: they vote after dispatching it, and count the votes when they
    read the metrics.
    """
    actions.run(actions.pending(loop), run, loop, signals)  # evaluates a new model, or finishes what a signal cut short
    # Within the loop a transfer between host and device that nobody asked for is an error: each step would wait for it.
    with run.batches(loop.step, loop.progress.data_state) as batches, jax.transfer_guard("disallow"):
        recorder.show_training(loop)
        recorder.profiler.start_loop()  # the time before the first batch is start-up
        while loop.step < run.length.total_steps and not loop.progress.stopped:
            recorder.begin_step(loop)
            delivery = steps.wait_for(batches, signals.check)
            recorder.before_step(loop, delivery)
            steps.dispatch(loop, delivery)  # advances the loop; the metrics stay on the device
            signals.vote()
            due = actions.due(loop.step)  # never empty after the last step, so that all metrics are read
            lag = 0 if due else 1  # actions need a state that is known to be finite
            read_metrics(steps, recorder, saver, lag=lag)
            signals.count_votes(lag=lag)
            recorder.profiler.step_done(loop.step)
            if due:
                actions.run(due, run, loop, signals)
            signals.check()


def read_metrics(steps: Steps, recorder: Recorder, saver: Saver, *, lag: int) -> None:
    """Records the metrics of all but the newest `lag` steps; raises Diverged if they are not finite."""
    for step, metrics in steps.read(lag=lag):
        if not all(math.isfinite(metrics[name]) for name in MUST_BE_FINITE):
            raise diverged(step, metrics, saver)
        logged = recorder.completed(step, metrics)
        if logged:
            saver.newest.warn_if_failed()


def diverged(step: int, metrics: Mapping[str, float], saver: Saver) -> Diverged:
    """Returns the error of a step whose loss, gradient or update is NaN or infinite."""
    terms = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    return Diverged(
        f"step {step}: the loss or its gradient is not finite ({terms}); last good checkpoint: {saver.in_words()}; "
        "in another --workdir, lower config.optim.lr, lengthen config.optim.warmup_epochs or set "
        "config.optim.clip_norm"
    )


def save_last_step(error: BaseException, run: Run, loop: Loop, steps: Steps, recorder: Recorder, saver: Saver) -> None:
    """Saves an interrupted run.

    Raises:
      Diverged: its last steps are not finite.
      UserError: it cannot be saved, or one of several processes has lost its data.
    """
    if isinstance(error, DataLost) and jax.process_count() > 1:
        raise UserError(str(error)) from error  # the others wait in the next step, and agree on no checkpoint
    run.console.stop()  # the progress bar; lines still appear
    # The checkpoint also holds batch statistics, measured on training data; it is saved without them if need be.
    run.evaluation.reader = PatientReader(LAST_READS_SECONDS, together=True)
    read_metrics(steps, recorder, saver, lag=0)
    saver.save(loop)
    try:
        saver.wait()
    except UserError as failure:
        newest = saver.newest.latest_step()
        kept = "nothing is saved" if newest is None else f"nothing newer than step {newest} is saved"
        raise UserError(f"{failure}; {kept}") from failure
