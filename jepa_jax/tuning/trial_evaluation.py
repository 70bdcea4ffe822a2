"""What a run does between its steps, for a trial that has to show that all of it fits in memory.

Features are extracted from a few hundred images, as more of them take more time but no more memory at once. What takes
memory with the size of the data set, the neighbours of k-NN and the data of the linear probe, has its full size.
"""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from jepa_jax.data.sources import Source
from jepa_jax.evals.features import Split
from jepa_jax.evals.knn import QUERIES, knn_accuracy
from jepa_jax.evals.linear_probe import PENALTIES, Standard, fit_softmax
from jepa_jax.evals.schedule import Evaluator
from jepa_jax.program.build import Program
from jepa_jax.program.checkpoint import Checkpoints
from jepa_jax.program.step import TrainState


@contextlib.contextmanager
def evaluation_and_checkpoint(
    config: Any, program: Program, sources: tuple[Source, Source], state: TrainState
) -> Iterator[None]:
    """A validation pass and the memory of the final one now; a checkpoint is written while steps go on."""
    evaluator = Evaluator(config.eval, program, sources, smoke=True)
    evaluator.at_epoch(state, config.eval.knn_every_epochs or 1)
    evaluator.spread(state)
    num_images = config.eval.max_images or len(sources[0])
    width = state.params["probe"]["kernel"].shape[0]
    evaluate_at_full_size(config.eval, min(num_images, len(sources[0])), width, len(sources[0].classes))
    with tempfile.TemporaryDirectory() as folder, Checkpoints(pathlib.Path(folder) / "checkpoints") as checkpoints:
        checkpoints.save(1, state, {"step": 1})
        yield
        checkpoints.wait()


def evaluate_at_full_size(config: Any, num_images: int, width: int, num_classes: int) -> None:
    """k-NN of one block of queries and one iteration of the linear probe, on features of so many train images."""
    train = Split(np.ones([num_images, width], np.float32), np.zeros(num_images, np.int32))
    some = Split(train.features[:QUERIES], train.labels[:QUERIES])
    knn_accuracy(train, some, num_classes, k=config.knn_k, temperature=config.knn_temperature)
    standardised = Standard.of(train.features)(train.features)
    fit_softmax(standardised, train.labels, num_classes, PENALTIES[0], iterations=1)["bias"].block_until_ready()
