"""Where figures go: metrics.jsonl, TensorBoard, Weights & Biases, and the person at the terminal."""

import contextlib
import json
import logging
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import disk_error, write_atomically
from jepa_jax.config.schema import config_hash


class Writer:
    """Takes named values of a step; closes at the end of a `with`."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def picture(self, step: int, name: str, image: np.ndarray) -> None:
        """Takes a uint8 image [h, w, 3], if this writer shows images."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class MetricsFile(Writer):
    """metrics.jsonl: a JSON object a line, steps never decreasing; lines after the resumed step are dropped first."""

    def __init__(self, path: pathlib.Path, start_step: int):
        kept = [line for line in _complete_lines(path) if json.loads(line)["step"] <= start_step] if start_step else []
        write_atomically(path, "".join(line + "\n" for line in kept))
        self._path = path
        try:
            self._file = path.open("a", buffering=1)  # a line at a time: a killed run keeps what it logged
        except OSError as error:
            raise disk_error(error, path) from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        row = {"step": step, **{name: _finite(value) for name, value in values.items()}}
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise disk_error(error, self._path) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a line that could not be written was reported when it was
            self._file.close()


def _complete_lines(path: pathlib.Path) -> list[str]:
    """Whole lines: a process that was killed while writing leaves half a one."""
    if not path.exists():
        return []
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def _finite(value: Any) -> Any:
    """JSON has no NaN: non-finite numbers become strings."""
    if value is None or isinstance(value, str | bool | int):
        return value
    value = float(value)
    return value if math.isfinite(value) else str(value)


class TensorBoard(Writer):
    """TensorBoard events; events after the resumed step are purged by the viewer."""

    def __init__(self, directory: pathlib.Path, start_step: int):
        from tensorboardX import SummaryWriter

        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)  # NaN is how a missing figure is written
        self._writer = SummaryWriter(str(directory), purge_step=start_step + 1 if start_step else None)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float | None):
                # A figure that cannot be measured here keeps its name, so that a dashboard finds it.
                self._writer.add_scalar(name, math.nan if value is None else value, step)

    def picture(self, step: int, name: str, image: np.ndarray) -> None:
        self._writer.add_image(name, image, step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class WandB(Writer):
    """Weights & Biases; WANDB_MODE=offline keeps everything on this machine."""

    def __init__(self, project: str, directory: pathlib.Path, config: dict[str, Any]):
        try:
            import wandb
        except ImportError:
            raise UserError(
                f"config.log.wandb_project = {project!r}: wandb is not installed; pip install 'jepa_jax[wandb]'"
            ) from None
        # The same id on resume: one run stays one run.
        run_id = f"{directory.name}-{config_hash(config)}"
        self._run = wandb.init(
            project=project, dir=str(directory), config=config, name=directory.name, id=run_id, resume="allow"
        )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, image: np.ndarray) -> None:
        import wandb

        self._run.log({name: wandb.Image(image)}, step=step)

    def close(self) -> None:
        self._run.finish()


def open_writers(workdir: Any, config: Any, start_step: int) -> list[Writer]:
    """The writers that the `log` group asks for."""
    writers: list[Writer] = [MetricsFile(workdir.metrics, start_step)]
    if config.log.tensorboard:
        writers.append(TensorBoard(workdir.path / "tensorboard", start_step))
    if config.log.wandb_project:
        writers.append(WandB(config.log.wandb_project, workdir.path, config.to_dict()))
    return writers
