"""Where figures go: metrics.jsonl, TensorBoard, Weights & Biases."""

import contextlib
import importlib.util
import json
import logging
import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import disk_error, write_atomically
from jepa_jax.config.groups import Config
from jepa_jax.config.schema import config_hash
from jepa_jax.program.workdir import Workdir


class Sink:
    """Takes named values of a step."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def picture(self, step: int, name: str, image: np.ndarray) -> None:
        """Takes a uint8 image [h, w, 3], if this sink shows images."""

    def close(self) -> None:
        raise NotImplementedError


class MetricsFile(Sink):
    """metrics.jsonl: one JSON object per line, steps never decreasing; a resumed run first drops later lines."""

    def __init__(self, path: pathlib.Path, start_step: int):
        kept = [line for line in _complete_lines(path) if json.loads(line)["step"] <= start_step] if start_step else []
        write_atomically(path, "".join(line + "\n" for line in kept))
        self._path = path
        try:
            self._file = path.open("a", buffering=1)  # line by line: a killed run keeps what it logged
        except OSError as error:
            raise disk_error(error, path) from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        row = {"step": step, **{name: _finite(value) for name, value in values.items()}}
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise disk_error(error, self._path) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the error was raised when the line was written
            self._file.close()


def _complete_lines(path: pathlib.Path) -> list[str]:
    """Returns the complete lines of a file; a process that is killed while writing leaves half a line."""
    if not path.exists():
        return []
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def _finite(value: Any) -> Any:
    """Returns a value that JSON can hold: non-finite numbers become strings."""
    if value is None or isinstance(value, str | bool | int):
        return value
    value = float(value)
    return value if math.isfinite(value) else str(value)


class TensorBoard(Sink):
    """TensorBoard events; the viewer drops events after the step from which a run was resumed."""

    def __init__(self, directory: pathlib.Path, start_step: int):
        from tensorboardX import SummaryWriter

        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)  # it warns of every NaN
        self._writer = SummaryWriter(str(directory), purge_step=start_step + 1 if start_step else None)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float | None):
                # A figure that cannot be measured on this machine keeps its name, so that a dashboard finds it.
                self._writer.add_scalar(name, math.nan if value is None else value, step)

    def picture(self, step: int, name: str, image: np.ndarray) -> None:
        self._writer.add_image(name, image, step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class WandB(Sink):
    """Weights & Biases; WANDB_MODE=offline keeps everything on this machine."""

    def __init__(self, project: str, directory: pathlib.Path, config: Config):
        try:
            import wandb
        except ImportError:
            raise missing_wandb(project) from None
        self._make_image = wandb.Image
        self._run = wandb.init(
            project=project,
            dir=str(directory),
            config=config.to_dict(),
            name=directory.name,
            id=f"{directory.name}-{config_hash(config)}",  # a resumed run has the same id
            resume="allow",
        )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, image: np.ndarray) -> None:
        self._run.log({name: self._make_image(image)}, step=step)

    def close(self) -> None:
        self._run.finish()


def missing_wandb(project: str) -> UserError:
    return UserError(f"config.log.wandb_project = {project!r}: wandb is not installed; pip install 'jepa_jax[wandb]'")


def check_sinks(config: Config) -> None:
    """Raises UserError if a sink that the config asks for cannot be opened."""
    if config.log.wandb_project and "wandb" not in sys.modules and importlib.util.find_spec("wandb") is None:
        raise missing_wandb(config.log.wandb_project)


def open_sinks(folder: Workdir, config: Config, start_step: int) -> list[Sink]:
    """Opens the sinks that the config group `log` asks for."""
    sinks: list[Sink] = [MetricsFile(folder.metrics, start_step)]
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder.path / "tensorboard", start_step))
    if config.log.wandb_project:
        sinks.append(WandB(config.log.wandb_project, folder.path, config))
    return sinks
