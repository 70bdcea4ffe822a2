"""The loss of what is held out of training."""

import types

import jax

from jepa_jax.data.contract import Cropping, Source
from jepa_jax.data.pipeline import eval_batches
from jepa_jax.evals.evaluators import EvaluationContext, Evaluator, Figures, Moment, Stage
from jepa_jax.methods.contract import Batch
from jepa_jax.methods.whole_batch import accumulates_exactly
from jepa_jax.program.objective import Objective, statistics_of
from jepa_jax.program.step import TrainState
from jepa_jax.runtime.mesh import batch_sharding


class ValidationLoss(Evaluator):
    """The mean loss of what is held out of training, with the weights as trained, without dropout.

    Measured at the end, and between steps when tests are due. Batches have the size that the loss sees in training; the
    last one is filled up with the first elements and counts less. What a method draws itself, such as masks, is drawn
    alike each time, and batch norm works as in training.
    """

    choosable = types.MappingProxyType({"validation_loss": "min"})

    def __init__(self, context: EvaluationContext):
        super().__init__(context)
        loss = Objective(context.program.method, context.program.factory, dropout=False).loss

        def loss_of(state: TrainState, batch: Batch, key: jax.Array) -> jax.Array:
            return loss(state.params, statistics_of(state), state, batch, key)[1][1]["loss"]

        self._loss = jax.jit(loss_of)

    def due(self, moment: Moment) -> bool:
        return moment.stage == Stage.FINAL or moment.is_test(self.context.config.eval)

    def elements(self, moment: Moment) -> int:
        return 0 if self.context.validation is None else len(self.context.validation)

    def run(self, state: TrainState, moment: Moment) -> Figures:
        config = self.context.config
        source: Source | None = self.context.validation
        assert source is not None  # otherwise there is no such evaluator
        if config.loader_crops and isinstance(source, Cropping):
            source = source.cropped(config.loader_crops, config.train.seed, 0)  # the same crops each time
        exact = accumulates_exactly(self.context.program.method, config)
        size, total = config.data.batch_size // (1 if exact else config.train.accum_steps), 0.0
        self.context.progress.start("validation loss", len(source))
        batches = eval_batches(source, size, batch_sharding(self.context.program.mesh))
        for number, (batch, valid) in enumerate(batches):
            total += valid * float(self._loss(state, batch, jax.random.key(number)))
            self.context.progress.advance(valid)
        return {"validation_loss": total / len(source)}
