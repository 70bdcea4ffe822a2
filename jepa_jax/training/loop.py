"""The training loop: one for every method.

It dispatches step n before it reads the metrics of step n - 1, so that the device has work queued unless an action is
due. Actions (evaluation, checkpoint) run between steps, on a state that is known to be finite.
"""

from typing import Any

import jax

from jepa_jax.base.errors import DataLost, Diverged, UserError
from jepa_jax.base.signals import Interrupted
from jepa_jax.program.checkpoint import params_sha256
from jepa_jax.program.step import evaluated_variables
from jepa_jax.training.actions import Actions
from jepa_jax.training.progress import Loop
from jepa_jax.training.session import Session
from jepa_jax.training.setup import Run


def train_loop(run: Run, session: Session) -> dict[str, Any]:
    """Trains from the newest checkpoint, or a new state, to the last step, then evaluates; returns the summary."""
    loop = session.restore_or(run.initial_state)
    actions = Actions(run, session, loop)
    try:
        try:
            train_steps(run, session, actions, loop)
            results = finish(session, actions, loop)
        except (Interrupted, DataLost):
            keep_last_step(run, session, actions, loop)
            raise
    except Interrupted as reason:
        session.leave_summary("interrupted", loop)
        run.console.line(f"{reason}: checkpoint of step {loop.step} written; the same command continues from there")
        raise
    except DataLost as error:
        session.leave_summary("interrupted", loop, reason=str(error))
        kept = f"checkpoint of step {loop.step} written: the same command continues from there"
        raise DataLost(f"{error}; {kept}") from error
    except Diverged as error:
        session.leave_summary(error.status, loop, reason=str(error))
        raise
    return session.leave_summary("finished", loop, **results)


def train_steps(run: Run, session: Session, actions: Actions, loop: Loop) -> None:
    """Takes the remaining steps, until patience ends, and between them the actions that are due."""
    actions.run(actions.pending(loop), loop)
    with run.batches(loop.step) as batches, jax.transfer_guard("disallow"):
        session.start_loop(loop)
        while loop.step < run.length.total_steps and not loop.progress.stopped:
            delivery = session.wait_for(batches)
            session.dispatch(loop, delivery)  # advances the loop; the metrics stay on the device
            due = actions.due(loop.step)
            session.read_metrics(loop, lag=0 if due else 1)
            actions.run(due, loop)
            session.raise_if_interrupted()


def finish(session: Session, actions: Actions, loop: Loop) -> dict[str, Any]:
    """Saves the last state and evaluates the chosen one; returns the final figures for the summary."""
    actions.save(loop)
    session.wait_until_saved()
    session.load_best(loop)
    results = actions.final(loop)
    return results | {"params_sha256": params_sha256(evaluated_variables(loop.state, "online")[0])}


def keep_last_step(run: Run, session: Session, actions: Actions, loop: Loop) -> None:
    """Saves an interrupted run; raises UserError if it cannot be saved."""
    run.console.stop()
    session.drain()
    actions.save(loop)
    try:
        session.wait_until_saved()
    except UserError as error:
        newest = session.checkpoints.latest_step()
        kept = "nothing is saved" if newest is None else f"nothing newer than step {newest} is saved"
        raise UserError(f"{error}; {kept}") from error
