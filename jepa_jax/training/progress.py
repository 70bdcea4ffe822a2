"""How far a run is: everything that a checkpoint holds."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jepa_jax.program.step import TrainState


@dataclasses.dataclass
class Progress:
    """What a checkpoint holds besides the state; JSON.

    Attributes:
      wall_seconds, cpu_seconds: that the run has used, in all its sessions.
      images_per_sec: of the newest session.
      skipped_images: names of unreadable images.
      done: the step after which each action was last done.
      untrained: figures of each evaluator before training.
      warnings: what each evaluator found wrong at its last run, if anything.
      failed: where and why each evaluator failed last, of those that did.
      best: figure, value, step and epoch of the best state so far; None before `train.keep_best` has chosen one.
      patience_reference: the figure that was the last improvement for `train.patience`.
      not_improved: evaluations since then.
      stopped: why the run ended early; "" if it did not.
      data_state: position of the data after the last step; the step tells it where there is random access.
    """

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    images_per_sec: float | None = None
    skipped_images: list[str] = dataclasses.field(default_factory=list)
    done: dict[str, int] = dataclasses.field(default_factory=dict)
    untrained: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    warnings: dict[str, str | None] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    best: dict[str, Any] | None = None
    patience_reference: float | None = None
    not_improved: int = 0
    stopped: str = ""
    data_state: dict[str, Any] | None = None

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Progress":
        """Returns what a checkpoint holds; entries of earlier versions are ignored."""
        return cls(**{field.name: stored[field.name] for field in dataclasses.fields(cls) if field.name in stored})

    def share_skipped(self) -> None:
        """Adds the unreadable images that other processes found; each of them must call this."""
        if jax.process_count() == 1:
            return
        own = json.dumps(self.skipped_images).encode()
        size = int(np.max(multihost_utils.process_allgather(np.int32(len(own)))))
        rows = multihost_utils.process_allgather(np.frombuffer(own.ljust(size), np.uint8))
        found = {name for row in rows for name in json.loads(bytes(row))}
        self.skipped_images += sorted(found - set(self.skipped_images))

    def choice(self, figure: str) -> dict[str, Any]:
        """Returns what a summary tells of the best state by a figure; empty without one (`train.keep_best`)."""
        if not figure:
            return {}
        best = self.best or dict.fromkeys(("value", "step", "epoch"))
        stopped = {"reason": f"stopped early: {self.stopped}"} if self.stopped else {}
        return {
            f"best_{figure}": best["value"],
            "best_step": best["step"],
            "best_epoch": best["epoch"],
            "stopped_early": bool(self.stopped),
            **stopped,
        }


@dataclasses.dataclass
class Loop:
    """The position of a run; `step` counts the dispatched steps, of which `state` is the result."""

    step: int
    state: TrainState
    progress: Progress
