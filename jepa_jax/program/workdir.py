"""A run's folder.

It holds config.json, environment.json, metrics.jsonl, TensorBoard events, checkpoints/, summary.json, profile.json and
report.html.
"""

import json
import pathlib
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import disk_error
from jepa_jax.config.schema import differing_keys

RESUME = ("auto", "never", "must")
# Keys that change how a run is carried out but not what comes out: a resumed run may have others.
FREE_ON_RESUME = (
    "data.dir",
    "data.num_workers",
    "data.prefetch",
    "data.pipeline",
    "train.checkpoint_",
    "log.",
    "profile.",
)


class Workdir:
    """Paths and small files of one run."""

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path).expanduser()
        self.config = self.path / "config.json"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.views = self.path / "views.png"
        self.pictures = self.path / "pictures"
        self.profile = self.path / "profile.json"
        self.report = self.path / "report.html"
        self.checkpoints = self.path / "checkpoints"

    def check(self, config: dict[str, Any], resume: str) -> None:
        """Refuses a folder that holds another run, or that cannot be made."""
        if resume not in RESUME:
            raise UserError(f"--resume={resume}: not one of {', '.join(RESUME)}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, self.path) from error
        # Without a checkpoint or a summary there is nothing to lose: an earlier start was refused or cut short.
        exists = self.config.exists() and (self.has_checkpoint() or self.summary.exists())
        if resume == "must" and not self.has_checkpoint():
            raise UserError(f"{self.path}: no checkpoint to resume from; check --workdir, or use --resume=auto")
        if exists and resume == "never":
            raise UserError(f"{self.path}: holds a run already; use --resume=auto to go on, or another --workdir")
        if exists:
            self._refuse_another(config)

    def _refuse_another(self, config: dict[str, Any]) -> None:
        free = tuple(f"config.{key}" for key in FREE_ON_RESUME)
        differing = [line for line in differing_keys(self.read_config(), config) if not line.startswith(free)]
        if differing:
            listing = "\n  ".join(differing)
            raise UserError(
                f"{self.path}: was made by another config; use another --workdir, or the same values:\n  {listing}"
            )

    def has_checkpoint(self) -> bool:
        """Whether a whole one is there; a killed process may leave the folder of one it had not finished."""
        return any(path.name.removeprefix("step_").isdigit() for path in self.checkpoints.glob("step_*"))

    def read_config(self) -> dict[str, Any]:
        return _read_json(self.config, "is this the folder of a run?")

    def read_summary(self) -> dict[str, Any] | None:
        return _read_json(self.summary, "delete it and start again") if self.summary.exists() else None


def _read_json(path: pathlib.Path, fix: str) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: not found; {fix}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); {fix}") from None
