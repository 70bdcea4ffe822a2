"""The combinations that a search may try on this machine, and the steps from one to the next."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.processes import num_cores
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import element_bytes
from jepa_jax.data.facts import data_facts
from jepa_jax.experiments.settings import FLAGS, LOADER_KNOBS, Combination, grid_values
from jepa_jax.program.config import changed_config

IN_MEMORY_SOURCES = ("shapes", "cifar10", "idx", "npz")  # read as a whole anyway
MOST_RESIDENT_BYTES = 2**31  # of images that a search tries to keep on the device
MOST_WORKERS, MOST_THREADS = 16, 8
GRAIN = 8  # images: a part of a batch between two powers is a multiple of this
FEWEST_IMAGES = 16  # of a part: fewer are no batch for losses and norms over one
CLOSEST_BATCHES = 1.15  # no batch is tried between two whose sizes differ by a smaller factor


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """Values of every knob; without `batch_sizes` any batch, with `fixed_batch` that one in any number of parts."""

    num_workers: tuple[int, ...]
    precisions: tuple[str, ...]
    remats: tuple[str, ...]
    pipelines: tuple[str, ...]
    grad_accum_steps: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    fixed_batch: int | None = None
    prefetches: tuple[int, ...] = ()
    worker_threads: tuple[int, ...] = ()
    most_workers: int = 0  # what may be tried beyond the list, if the loader is seen to need as many
    most_threads: int = 0  # the same of the threads of each worker

    @property
    def has_free_batch(self) -> bool:
        return self.fixed_batch is None and not self.batch_sizes

    def start(self, given: Combination) -> Combination:
        """Returns the settings of the config, with the fixed batch if there is one, in parts that divide it."""
        batch = self.fixed_batch or given.batch_size
        parts = given.grad_accum_steps if batch % given.grad_accum_steps == 0 else 1
        return dataclasses.replace(given, batch_size=batch, grad_accum_steps=parts)

    def larger(self, combination: Combination) -> Combination | None:
        """Doubles the images at a time, or takes the next of the list."""
        if self.has_free_batch:
            return dataclasses.replace(combination, batch_size=2 * combination.batch_size)
        return next((c for c in self._listed(combination) if c.part_size > combination.part_size), None)

    def smaller(self, combination: Combination) -> Combination | None:
        """Halves the images at a time, or takes the next of the list."""
        if self.has_free_batch:
            return _resized(combination, combination.batch_size / 2)
        return next((c for c in self._listed(combination)[::-1] if c.part_size < combination.part_size), None)

    def between(self, low: Combination, high: Combination) -> Combination | None:
        """Returns the batch half-way, if the batch is free and the two are not close."""
        middle = _resized(low, (low.batch_size + high.batch_size) / 2)
        is_far = self.has_free_batch and high.batch_size >= CLOSEST_BATCHES * low.batch_size
        return middle if middle and is_far and middle.batch_size > low.batch_size else None

    def neighbours(self, leader: Combination) -> list[Combination]:
        """Returns every change of one knob except the batch; data on the device needs no workers to change."""
        values: dict[str, Sequence[Any]] = {
            "num_workers": self.num_workers if leader.pipeline != "device" else (),
            "worker_threads": self.worker_threads if leader.num_workers else (),
            "prefetch": self.prefetches if leader.pipeline != "device" else (),
            "pipeline": self.pipelines,
            "precision": self.precisions,
            "remat": self.remats,
            "grad_accum_steps": [parts for parts in self.grad_accum_steps if leader.batch_size % parts == 0],
        }
        changed = [dataclasses.replace(leader, **{knob: value}) for knob, found in values.items() for value in found]
        different = dict.fromkeys(c.without_idle_workers() for c in changed)
        return [c for c in different if c != leader and c.part_size >= 2]

    def _listed(self, combination: Combination) -> list[Combination]:
        """Returns the combination with every batch of the list, or with the fixed batch in every number of parts.

        Those with fewer images at a time come first.
        """
        if self.fixed_batch is None:
            sizes = [size for size in sorted(self.batch_sizes) if size % combination.grad_accum_steps == 0]
            return [dataclasses.replace(combination, batch_size=size) for size in sizes]
        powers = [2**k for k in range(12) if self.fixed_batch % 2**k == 0]
        enough = [parts for parts in powers if self.fixed_batch // parts >= FEWEST_IMAGES]
        counts = sorted(self.grad_accum_steps or enough or [1], reverse=True)
        return [dataclasses.replace(combination, grad_accum_steps=count) for count in counts]


def _resized(combination: Combination, batch: float) -> Combination | None:
    """Returns the combination with about this batch size, of which each part has enough images."""
    step = GRAIN * combination.grad_accum_steps
    size = int(batch // step * step)
    enough = size >= FEWEST_IMAGES * combination.grad_accum_steps
    return dataclasses.replace(combination, batch_size=size) if enough else None


def changes(a: Combination, b: Combination) -> list[tuple[str, Any]]:
    """Returns the knobs in which b differs from a, with their values in b; without a loader workers do not count."""
    names = [field.name for field in dataclasses.fields(Combination)]
    counted = [name for name in names if name not in LOADER_KNOBS or b.pipeline != "device"]
    return [(name, getattr(b, name)) for name in counted if getattr(a, name) != getattr(b, name)]


def make_space(
    config: Config, texts: Mapping[str, str | None], *, fixed_batch: str = "", use_dummy_data: bool = False
) -> SearchSpace:
    """Returns the lists of the command line by flag, or what is worth a try on this machine, with the config's values.

    `fixed_batch` is "" for any batch, "config" for that of the config, or a number.
    """
    own = Combination.of(config)
    given = grid_values(config, {flag: text or None for flag, text in texts.items()})

    def values(flag: str, default: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Returns the config's own value and those of the list; the defaults without a list, none without either."""
        present, listed = getattr(own, FLAGS[flag]), given[flag] if texts.get(flag) else default
        return tuple(dict.fromkeys([present, *listed])) if listed else ()

    if fixed_batch not in ("", "config") and not fixed_batch.isdigit() or fixed_batch == "1":
        raise UserError(
            f"--fixed_effective_batch={fixed_batch}: write a number of images, or config for that of the config"
        )
    # What a user's own source does in threads is not known.
    shares_threads = ":" not in config.data.source.removeprefix("tfds:")
    return SearchSpace(
        num_workers=tuple(sorted(values("num_workers", worker_counts(num_cores())))),
        precisions=values("precisions", ("float32", "bfloat16")),
        remats=values("remats", ("none", "full") if allows_remat(config) else ("none",)),
        pipelines=values("pipelines", ("grain", "device")[: 1 + fits_on_device(config.data, use_dummy_data)]),
        grad_accum_steps=values("grad_accum"),
        batch_sizes=tuple(sorted(values("batch_sizes"))),
        fixed_batch=own.batch_size if fixed_batch == "config" else int(fixed_batch or 0) or None,
        prefetches=values("prefetch", (own.prefetch, 2 * own.prefetch)),
        worker_threads=values("worker_threads", (own.worker_threads, (1 + shares_threads) * own.worker_threads)),
        most_workers=0 if texts.get("num_workers") else min(MOST_WORKERS, num_cores()),
        most_threads=MOST_THREADS if shares_threads and not texts.get("worker_threads") else 0,
    )


def allows_remat(config: Config) -> bool:
    """Returns whether the encoder has something to recompute."""
    try:
        return bool(changed_config(config, {"train.remat": "full"}))
    except UserError:
        return False


def worker_counts(cores: int) -> list[int]:
    """Returns 0, and a quarter, half and all of the cores, up to MOST_WORKERS."""
    return sorted({0, *(max(1, min(MOST_WORKERS, cores // part)) for part in (4, 2, 1))})


def fits_on_device(data: Any, dummy: bool) -> bool:
    """Returns whether it is worth a try to keep a data set on the device, by what is known before it is read."""
    if data.crops == "loader" or (not dummy and data.source not in IN_MEMORY_SOURCES):
        return False
    facts = data_facts(data, assume=True)
    return facts.num_train * element_bytes(facts.spec) <= MOST_RESIDENT_BYTES
