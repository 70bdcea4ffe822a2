"""The training loop: one for every method.

It dispatches step n and only then reads the metrics of step n - 1, so the device always has work queued and never
waits for the host. Checkpoints and evaluations happen between two steps.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from jepa_jax.base.console import Console
from jepa_jax.base.errors import Diverged, UserError
from jepa_jax.base.files import write_json
from jepa_jax.base.signals import Interrupted
from jepa_jax.config.schema import validate
from jepa_jax.data.facts import DataFacts
from jepa_jax.data.pictures import example_views, save_views
from jepa_jax.data.pipeline import train_batches
from jepa_jax.data.sources import Source, open_source
from jepa_jax.evals.baselines import published_baselines
from jepa_jax.evals.schedule import Evaluator
from jepa_jax.planning import memory_check
from jepa_jax.program.build import Length, Program, build_program
from jepa_jax.program.checkpoint import params_sha256
from jepa_jax.program.step import TrainState, evaluated_params
from jepa_jax.program.workdir import Workdir
from jepa_jax.reports.run_report import write_report
from jepa_jax.runtime.memory import is_out_of_memory
from jepa_jax.runtime.mesh import batch_sharding, check_batch
from jepa_jax.runtime.provenance import environment, unused_gpu
from jepa_jax.runtime.start import setup
from jepa_jax.train.session import Session, bar_note

INIT_IMAGES = 1024  # that a method may look at to initialise itself
PICTURED_IMAGES = 8  # in the picture of augmented views


def train(config: Any, workdir: str | pathlib.Path, *, resume: str = "auto", console: Console) -> dict[str, Any]:
    """Trains as `config` says in `workdir`, from its newest checkpoint if there is one; returns the summary.

    Raises:
        UserError: something to fix; before anything is compiled where possible.
        Diverged: the loss became NaN or infinite, or (Collapsed) the features all alike.
        Interrupted: SIGINT or SIGTERM; a checkpoint of the last step is on disk.
    """
    validate(config)
    folder = Workdir(workdir)
    folder.check(config.to_dict(), resume)
    summary = folder.read_summary()
    if summary and summary["status"] == "finished":
        console.line(f"{folder.path}: finished already; nothing to do")
        if not folder.report.exists():
            write_report(folder.path)
        return summary

    mesh = setup(config)
    check_batch(config, mesh)
    sources = open_source(config.data, "train"), open_source(config.data, "test")
    sample = first_images(sources[0], INIT_IMAGES)
    size: Any = {"num_train": len(sources[0]), "num_classes": len(sources[0].classes)}
    program = build_program(config, **size, sample=sample, mesh=mesh)
    facts = DataFacts.of(sources[0])
    memory_check.check_memory(config, program, facts, console)
    if unused := unused_gpu():
        console.warn(unused)
    folder.create()
    if jax.process_index() == 0:
        write_json(folder.config, config.to_dict())
        write_json(folder.environment, environment())

    try:
        return run_session(config, folder, program, sources, sample, console)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(memory_check.explain_out_of_memory(config, program, facts, console)) from error


def run_session(
    config: Any,
    folder: Workdir,
    program: Program,
    sources: tuple[Source, Source],
    sample: np.ndarray,
    console: Console,
) -> dict[str, Any]:
    """From the newest checkpoint, or a new state, to the last step; returns the summary."""
    with Session(config, folder, program.length, console) as session:
        state = session.restore_or(lambda: program.factory.create(config.train.seed, sample), program)
        if session.writes and not folder.views.exists():
            pictured = sample[:PICTURED_IMAGES]
            augment = config.data.augment
            save_views(folder.views, pictured, example_views(program.method, pictured), augment.mean, augment.std)
        return run_steps(config, session, program, sources, state)


def run_steps(
    config: Any, session: Session, program: Program, sources: tuple[Source, Source], state: TrainState
) -> dict[str, Any]:
    """From the present step to the last, with everything that happens between steps; returns the summary."""
    length, console, step = program.length, session.console, session.progress["step"]
    evaluator = Evaluator(
        config.eval,
        program,
        sources,
        smoke=length.total_steps < length.steps_per_epoch,
        on_images=session.on_images,
        on_skipped=session.on_skipped,
    )
    facts = {"num_classes": len(sources[0].classes), "baselines": published_baselines(config.data.source)}
    batches = train_batches(
        config.data,
        sources[0],
        seed=config.train.seed,
        sharding=batch_sharding(program.mesh),
        start_step=step,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )

    def evaluate_epoch(epoch: int, values: dict[str, float] | None) -> None:
        images = evaluator.images_at(epoch)
        results = session.measure("test", images, step, lambda: evaluator.at_epoch(state, epoch))
        session.log(step, "eval", results)
        console.line(epoch_line(epoch, length, values, results, session))

    def watch_collapse() -> None:
        figures = session.measure("collapse watch", evaluator.watched_images, step, lambda: evaluator.spread(state))
        session.watch_collapse(step, figures)

    draw = painter(config, program, sources[1])

    def end_epoch(epoch: int, values: dict[str, float] | None) -> None:
        """What is measured and drawn at the end of every epoch, as far as it is due."""
        watch_collapse()
        if evaluator.due(epoch):
            evaluate_epoch(epoch, values)
        last = step == length.total_steps
        if draw is not None and (epoch % config.log.pictures_every_epochs == 0 or last):
            with session.timeline.section("visualization"):
                session.draw(step, draw(state))
        session.progress["ended_epoch"] = epoch

    def finish() -> dict[str, Any]:
        """Everything up to the last step, and what is measured of the trained encoder."""
        nonlocal state, step
        if config.eval.untrained and session.progress["untrained_probe_accuracy"] is None:
            measured = session.measure("untrained", evaluator.num_images, step, lambda: evaluator.untrained(state))
            session.progress |= measured
            probe, knn = measured["untrained_probe_accuracy"], measured["untrained_knn_accuracy"]
            console.line(f"untrained encoder: linear probe {probe:.1f} %, k-NN {knn:.1f} %")

        if session.progress["initial_spread"] is None:
            watch_collapse()
        epoch, within = divmod(step, length.steps_per_epoch)
        if step and within == 0 and session.progress["ended_epoch"] < epoch:
            end_epoch(epoch, None)  # the signal that ended the last session came before this one
        console.start("train", length.total_steps, step)
        session.start_loop()
        while step < length.total_steps:
            session.before_step(step)
            with session.timeline.section("data_wait"):
                batch, info = next(batches)
            state = session.dispatch(step + 1, state, batch, info)
            step += 1

            epoch, within = divmod(step, length.steps_per_epoch)
            epoch_ends = within == 0
            every = config.train.checkpoint_every_steps
            due = epoch_ends if every == 0 else step % every == 0
            checkpoint = due and step < length.total_steps  # the last one waits for calibrated statistics
            # Whatever looks at the state waits until it is known to be finite.
            looked_at = epoch_ends or checkpoint or session.wants_quiet(step)
            values = session.read_metrics(all_but=0 if looked_at else 1)
            session.after_step(step)
            if epoch_ends:
                end_epoch(epoch, values)
            if checkpoint:
                session.save(step, state)
            if epoch_ends:
                session.close_epoch(step)

        session.read_metrics(all_but=0)
        session.close_epoch(step)  # of which only a part was asked for
        state = evaluator.calibrated(state)  # part of the encoder that is kept
        session.save(step, state)
        results = session.measure("linear probe", evaluator.num_images, step, lambda: evaluator.final(state))
        session.log(step, "eval", {name: results[name] for name in ("probe_accuracy", "knn_accuracy")})
        session.checkpoints.wait()
        return results

    def stop(reason: Interrupted) -> None:
        console.stop()
        session.read_metrics(all_but=0)
        # A run that has taken its last step keeps what it would have kept: calibrated statistics.
        session.save(step, evaluator.calibrated(state) if step == length.total_steps else state)
        session.checkpoints.wait()
        session.leave_summary("interrupted", step, **facts)
        console.line(f"{reason}: checkpoint of step {step} written; the same command goes on from there")

    try:
        try:
            results = finish()
        except Interrupted as reason:
            stop(reason)
            raise
    except Diverged as error:
        session.checkpoints.wait()
        session.leave_summary(error.status, step, **facts, reason=str(error))
        raise
    finally:
        batches.close()
        console.stop()
    digest = params_sha256(state.params["model"])
    return session.leave_summary("finished", step, **facts, **results, params_sha256=digest)


def painter(config: Any, program: Program, source: Source) -> Callable[[TrainState], np.ndarray] | None:
    """What draws the pictures of a method for a state, of the first test images; None if there are none."""
    if not config.log.pictures_every_epochs:
        return None
    images = first_images(source, PICTURED_IMAGES)

    def pictures(params, stats, images):
        model = nnx.merge(program.factory.graphdef, params, stats, copy=True)
        return program.method.pictures(model, images, jax.random.key(0))

    abstract = program.factory.abstract
    if jax.eval_shape(pictures, abstract.params["model"], abstract.stats, images) is None:
        return None
    draw = jax.jit(pictures)
    return lambda state: np.asarray(draw(evaluated_params(state, config.eval.weights), state.stats, images))


def first_images(source: Source, count: int) -> np.ndarray:
    return source.batch(np.arange(min(count, len(source))))["image"]


def epoch_line(epoch: int, length: Length, values: Any, results: dict[str, float], session: Session) -> str:
    """One line for an epoch that was evaluated."""
    epochs = length.total_steps / length.steps_per_epoch
    parts = [f"epoch {epoch}/{epochs:g}"] + ([bar_note(values, session.speed)] if values else [])
    parts += [f"{name.removesuffix('_accuracy').replace('_', ' ')} {value:.1f} %" for name, value in results.items()]
    return "  ".join(parts)
