"""The folder of a run: config, environment, metrics, checkpoints, summary, profile and report."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import make_folder, read_json, remove_leftovers, user_path
from jepa_jax.base.processes import only_one, same_file
from jepa_jax.config.resolve import resolve_stored
from jepa_jax.data.contract import Spec, spec_from_json
from jepa_jax.program.checksums import step_folders
from jepa_jax.program.identity import EXTENSIBLE, LENGTH, config_differences, is_longer

RESUME = ("auto", "never", "must")


class Workdir:
    """Paths and small files of one run; nothing is created before `create`."""

    def __init__(self, path: str | os.PathLike[str]):
        if not os.fspath(path):
            raise UserError("--workdir is empty: give the folder of the run; . is the current one")
        self.path = user_path(path, "--workdir")
        self.config = self.path / "config.json"
        self.environment = self.path / "environment.json"
        self.elements = self.path / "elements.json"  # dtype and shape of each array of an element
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.views = self.path / "views.png"
        self.pictures = self.path / "pictures"
        self.exhibits = self.path / "exhibits"
        self.profile = self.path / "profile.json"
        self.report = self.path / "report.html"
        self.checkpoints = self.path / "checkpoints"
        self.best = self.path / "best"
        self._descriptor: int | None = None  # of the folder while it is held

    def check(self, config: dict[str, Any], resume: str, allowed: Sequence[str] = ()) -> None:
        """Raises UserError if the folder cannot be written, holds another run, or does not fit `resume`.

        `allowed` may name "config", which then may be another one.
        """
        if resume not in RESUME:
            raise UserError(f"--resume={resume}: not one of {', '.join(RESUME)}")
        if (shown := os.fsencode(self.path).decode(errors="backslashreplace")) != str(self.path):
            raise UserError(f"--workdir = {shown}: not UTF-8, which checkpoints need; give another one")
        nearest = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise UserError(f"{self.path}: cannot be written ({nearest} is read-only or a file); choose another place")
        # Without a checkpoint or a summary there is nothing to lose: an earlier start was refused or cut short.
        exists = self.config.exists() and (self.has_checkpoint() or self.summary.exists())
        if resume == "must" and not self.has_checkpoint():
            raise UserError(f"{self.path}: no checkpoint to resume from; check --workdir, or use --resume=auto")
        if exists and resume == "never":
            raise UserError(f"{self.path}: holds a run already; use --resume=auto to continue, or another --workdir")
        if exists and "config" not in allowed:
            self._refuse_another(config)

    def _refuse_another(self, config: dict[str, Any]) -> None:
        if differing := config_differences(self.read_config(), config):
            listing = "\n  ".join(differing)
            hint = (
                f"; a run becomes longer only if optim.schedule is {' or '.join(EXTENSIBLE)} from the start; "
                f"to train on from its weights: --workdir=ANOTHER --config.model.init_from={self.path}"
            )
            raise UserError(
                f"{self.path}: was made by another config; use another --workdir, the same values, or "
                f"--allow_changed=config{hint if any(key in listing for key in LENGTH) else ''}:\n  {listing}"
            )

    def is_longer(self, config: dict[str, Any]) -> bool:
        """Returns whether a config continues the run of this folder to more epochs or steps."""
        return is_longer(resolve_stored(self.read_config(), config).to_dict(), config)

    def every_checkpoint(self) -> list[pathlib.Path]:
        return [folder for parent in (self.checkpoints, self.best) for _, folder in step_folders(parent)]

    def create(self) -> None:
        """Creates the folder; call it when everything that may refuse a run has been checked."""
        make_folder(self.path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other trainings out of the folder; raises UserError if one is under way in it.

        Removes what one that was killed left half-written.
        Until the end, `check_still_there` knows whether the folder is the same.
        """
        refusal = f"{self.path}: another training is under way in it; wait for its end, or use another --workdir"
        with only_one(self.path / ".lock", refusal):
            self._descriptor = os.open(self.path, os.O_RDONLY)  # so that a new folder cannot get its number
            try:
                remove_leftovers(self.path, [file.name for file in self.small_files()])
                for folder in (self.pictures, self.exhibits):
                    remove_leftovers(folder)
                yield
            finally:
                os.close(self._descriptor)
                self._descriptor = None

    def check_still_there(self) -> None:
        """Raises UserError if the folder was removed, or replaced by another one, while it is held."""
        if self._descriptor is not None and not same_file(self._descriptor, self.path):
            raise UserError(
                f"{self.path}: was removed or replaced during the run, and the checkpoints with it; "
                "start again, and leave the folder in place until the run has ended"
            )

    def small_files(self) -> tuple[pathlib.Path, ...]:
        """Returns the files beside the checkpoints that tell what the run is and how it went."""
        return self.config, self.environment, self.metrics, self.summary, self.views, self.profile, self.report

    def has_checkpoint(self) -> bool:
        """Returns whether there is a complete checkpoint; a killed process may leave an incomplete one."""
        return bool(self.checkpoint_folders())

    def checkpoint_folders(self) -> list[pathlib.Path]:
        """Returns the folders that hold checkpoints to evaluate: that of the best one first, if the run keeps it."""
        return [folder for folder in (self.best, self.checkpoints) if step_folders(folder)]

    def read_config(self) -> dict[str, Any]:
        return read_json(self.config, "is this the folder of a run?")

    def read_spec(self) -> Spec:
        """Returns what the elements of the data consist of; {} for a run of an earlier version, which is of images."""
        if not self.elements.exists():
            return {}
        fix = "put back a copy, or remove it if the data are images"
        stored = read_json(self.elements, fix)
        try:
            return spec_from_json(stored)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.elements}: not the arrays of an element ({error}); {fix}") from None

    def read_summary(self) -> dict[str, Any] | None:
        return read_json(self.summary, "delete it and start again") if self.summary.exists() else None
