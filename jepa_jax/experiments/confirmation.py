"""Does once what a run does between its steps, to show that a choice of settings fits in memory."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from jepa_jax.config.groups import Config
from jepa_jax.data.contract import Source
from jepa_jax.evals.evaluators import SMOKE_IMAGES, EvaluationContext, Moment, Stage, build_evaluators
from jepa_jax.evals.features import Split
from jepa_jax.evals.knn import QUERIES, knn_accuracy
from jepa_jax.evals.linear_probe import PENALTIES, Standard, fit_softmax, gram_matrix
from jepa_jax.evals.sources import part_of
from jepa_jax.program.build import Program
from jepa_jax.program.checkpoint import Checkpoints
from jepa_jax.program.step import TrainState


@contextlib.contextmanager
def evaluation_and_checkpoint(
    config: Config, program: Program, sources: tuple[Source, Source], state: TrainState
) -> Iterator[None]:
    """Does what a run does between its steps, to show that it fits in memory; a checkpoint is written meanwhile.

    Features are extracted from a few hundred images: more of them take more time, but no more memory at once. What
    grows with the data set, the neighbours of k-NN and the data of the linear probe, has its full size.
    """
    few = part_of(sources[0], SMOKE_IMAGES), part_of(sources[1], SMOKE_IMAGES)
    context = EvaluationContext(config, program, few)
    moment = Moment(Stage.EPOCH, step=1, epoch=config.eval.knn_every_epochs or config.eval.every_epochs)
    evaluators = build_evaluators(context)
    for evaluator in evaluators.values():
        if evaluator.due(moment):
            evaluator.run(state, moment)
    context.forget()
    train = sources[0]
    if "classification" in evaluators and train.classes:
        width = state.params["probe"]["kernel"].shape[0]
        evaluate_at_full_size(config.eval, len(part_of(train, config.eval.max_images)), width, len(train.classes))
    with tempfile.TemporaryDirectory() as folder, Checkpoints(pathlib.Path(folder) / "checkpoints") as checkpoints:
        checkpoints.save(1, state, {"step": 1})
        yield
        checkpoints.wait()


def evaluate_at_full_size(config: Any, num_images: int, width: int, num_classes: int) -> None:
    """Runs k-NN on one block of queries and one fit of the probe, with equal features of all train images."""
    labels = np.arange(num_images, dtype=np.int32) % num_classes
    train = Split(np.ones([num_images, width], np.float32), labels)
    some = Split(train.features[:QUERIES], train.labels[:QUERIES])
    knn_accuracy(train, some, num_classes, k=config.knn_k, temperature=config.knn_temperature)
    standardised = Standard.of(train.features)(train.features)
    fit_softmax(standardised, train.labels, num_classes, PENALTIES[0], gram_matrix(standardised))
