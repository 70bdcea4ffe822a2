"""Computes length and price of a run: training at the predicted speed or the loader's, evaluation, checkpoints."""

import dataclasses
import math
from collections.abc import Mapping

from jepa_jax.config.schema import flatten
from jepa_jax.data.facts import DataFacts
from jepa_jax.planning.absent_gpus import num_hosts
from jepa_jax.planning.planner import Plan
from jepa_jax.program.build import Length
from jepa_jax.runtime.hardware import Gpu

COMPILE_SECONDS = 60.0  # of one program on the real GPU, the choice of kernels by measurement included: an assumption
DISK_BYTES_PER_SECOND = 1e9  # at which a checkpoint is written: an assumption
TEST_SHARE = 0.2  # of the train images, that the test split is taken to have
FORWARD_SHARE = 1 / 3  # of a training step: the forward pass of an encoder
FEATURE_BYTES = 4
QUERIES = 500  # rows of the similarities that k-NN holds at once


@dataclasses.dataclass(frozen=True)
class PlanContext:
    """What plans are told from outside: the data, a price, the loader of this machine."""

    data: DataFacts
    price_per_hour: float = 0.0  # per GPU, in any currency, for those without a price of their own
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by key of the GPU
    loader_images_per_sec: float | None = None  # of one host
    loader_note: str = ""  # why there is no rate
    feature_numbers: int = 0  # of one image; 0 if unknown

    def price_of(self, gpu: Gpu) -> float:
        """Returns the price of an hour of a GPU; 0 if it is unknown."""
        return self.prices.get(gpu.key, self.price_per_hour)


@dataclasses.dataclass(frozen=True)
class RunCost:
    """Seconds of a run by what takes them; from and to, by the error of the prediction, for the sum and the price."""

    steps: int
    parts: dict[str, float]
    seconds: tuple[float, float]
    prices: tuple[float, float]


def run_cost(plan: Plan, context: PlanContext) -> RunCost:
    """Returns what a whole run takes: steps, evaluation, checkpoints and compilation."""
    config, speed = plan.request.config, plan.estimate.speed
    batch = config.data.batch_size
    length = Length.of(config, max(context.data.num_train, batch))
    hosts, rate = num_hosts(plan.request.topology), context.loader_images_per_sec
    loading = 0.0 if rate is None or config.data.pipeline == "device" else 1 / (rate * hosts)  # per image
    forward = FORWARD_SHARE / max(1, flatten(config).get("method.views") or 1)  # of training: one view, forward only
    every, epochs = config.train.checkpoint_every_steps, config.optim.epochs
    saves = length.total_steps / every if every else max(1, epochs / config.train.checkpoint_every_epochs)
    totals = []
    for images_per_sec in (speed.images_per_sec, *reversed(speed.predicted)):
        image = 1 / images_per_sec
        totals.append({
            "training": length.total_steps * batch * max(image, loading),
            "evaluation": evaluated_images(plan, context.data, length) * max(image * forward, loading),
            "checkpoints": math.ceil(saves) * plan.estimate.facts.state_bytes / DISK_BYTES_PER_SECOND,
            "compilation": 2 * COMPILE_SECONDS,
        })  # fmt: skip
    fast, slow = (sum(parts.values()) for parts in totals[1:])
    hour = context.price_of(plan.request.gpu)
    prices = [hour * plan.request.devices * seconds / 3600 for seconds in (fast, slow)]
    return RunCost(length.total_steps, totals[0], (fast, slow), (prices[0], prices[1]))


def evaluated_images(plan: Plan, data: DataFacts, length: Length) -> float:
    """Returns how many images all evaluations of a run extract features of."""
    config = plan.request.config
    evals = config.eval
    epochs = config.optim.epochs
    tests = (epochs // evals.every_epochs if evals.every_epochs else 0) + 1
    if evals.every_steps:
        tests = length.total_steps // evals.every_steps + 1
    neighbours = (epochs // evals.knn_every_epochs if evals.knn_every_epochs else 0) + 1 + int(evals.untrained)
    limit = evals.max_images or data.num_train
    train, test = min(limit, data.num_train), min(limit, TEST_SHARE * data.num_train)
    return tests * test + neighbours * (train + test)


def evaluation_bytes(plan: Plan, context: PlanContext) -> int:
    """Returns what one device holds while k-NN and the probe run; 0 if the size of features is unknown."""
    if not context.feature_numbers:
        return 0
    limit = plan.request.config.eval.max_images or context.data.num_train
    train = min(limit, context.data.num_train)
    features = (1 + TEST_SHARE) * train * context.feature_numbers * FEATURE_BYTES
    # Features are there twice, as extracted and scaled to unit length; k-NN compares a block of queries with all.
    needed = 2 * features + QUERIES * train * FEATURE_BYTES
    return round(needed) + plan.estimate.facts.state_bytes
