"""Where figures go: metrics.jsonl, TensorBoard, Weights & Biases."""

import json
import math
import os
import pathlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jepa_jax.base.classes import import_extra
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import AppendedFile, disk_reason, make_folder, write_atomically
from jepa_jax.config.groups import Config
from jepa_jax.config.schema import config_hash
from jepa_jax.data.pictures import png
from jepa_jax.program.workdir import Workdir

FINISH_SECONDS = 60  # that a service gets to send the rest


class Sink:
    """Takes named values of a step."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def picture(self, step: int, name: str, image: np.ndarray) -> None:
        """Takes a uint8 image [h, w, 3], if this sink shows images."""

    def alert(self, title: str, text: str) -> None:
        """Tells people who do not look at the run, if this sink can."""

    def close(self) -> None:
        raise NotImplementedError


class MetricsFile(Sink):
    """metrics.jsonl: one JSON object per line, steps never decreasing.

    A resumed run first drops lines of later steps, and lines that are damaged, of which it warns. What it measures
    again at the step where it resumes, such as the final figures, is not written twice. A file that cannot be read is
    set aside.
    """

    def __init__(self, path: pathlib.Path, start_step: int, warn: Callable[[str], None]):
        lines: list[bytes] = []
        if start_step and path.exists():
            try:
                *lines, _ = path.read_bytes().split(b"\n")  # a process that is killed while writing leaves half a line
            except OSError as error:
                aside = path.rename(path.with_name(f"damaged_{path.name}"))
                warn(f"{path}: cannot be read ({error.strerror}); set aside as {aside.name}, and begun again")
        rows = [_row_of(line) for line in lines]
        if damaged := rows.count(None):
            warn(f"{path}: {damaged} damaged lines were dropped (not JSON objects with a step)")
        kept = [(line, row) for line, row in zip(lines, rows, strict=True) if row and row["step"] <= start_step]
        self._there = {(row["step"], *row) for _, row in kept if row["step"] == start_step}  # names of their values
        write_atomically(path, b"".join(line + b"\n" for line, _ in kept))
        self._file = AppendedFile(path)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        row = {"step": step, **{name: _finite(value) for name, value in values.items()}}
        if (step, *row) in self._there:
            return
        self._file.append(json.dumps(row).encode() + b"\n")  # a killed run keeps what it logged

    def close(self) -> None:
        self._file.close()


def _row_of(line: bytes) -> dict[str, Any] | None:
    """Returns a line of metrics; None if it is damaged."""
    try:
        row = json.loads(line.decode())
        return row if isinstance(row["step"], int) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _finite(value: Any) -> Any:
    """Returns a value that JSON can hold: non-finite numbers become strings."""
    if value is None or isinstance(value, str | bool | int):
        return value
    value = float(value)
    return value if math.isfinite(value) else str(value)


class TensorBoard(Sink):
    """TensorBoard events; the viewer drops events after the step from which a run was resumed.

    Events are written at once, by the caller: the queue of tensorboardX has a thread that ends when the disk is full,
    and whoever fills the queue then waits for ever.
    """

    def __init__(self, directory: pathlib.Path, start_step: int):
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        make_folder(directory)
        # Viewers read files in the order of their names.
        name = f"events.out.tfevents.{time.time_ns() // 1000:016d}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(directory / name)
        try:
            self._append(self._event(file_version="brain.Event:2"))
            if start_step:
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._append(self._event(step=start_step + 1, session_log=start))
        except OSError:
            self._file.close()
            (directory / name).unlink()  # the next attempt has another name
            raise

    def _append(self, event: Any) -> None:
        from tensorboardX.record_writer import masked_crc32c

        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checks = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
        self._file.append(length + next(checks) + data + next(checks))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        # A figure that cannot be measured on this machine keeps its name, so that a dashboard finds it.
        scalars = [
            self._summary.Value(tag=name, simple_value=math.nan if value is None else value)
            for name, value in values.items()
            if isinstance(value, int | float | None)
        ]
        self._append(self._event(step=step, summary=self._summary(value=scalars)))

    def picture(self, step: int, name: str, image: np.ndarray) -> None:
        height, width, colors = image.shape
        shown = self._summary.Image(height=height, width=width, colorspace=colors, encoded_image_string=png(image))
        value = self._summary.Value(tag=name, image=shown)
        self._append(self._event(step=step, summary=self._summary(value=[value])))

    def close(self) -> None:
        self._file.close()


class WandB(Sink):
    """Weights & Biases; WANDB_MODE=offline keeps everything on this machine."""

    def __init__(self, project: str, directory: pathlib.Path, config: Config):
        import wandb

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

    def alert(self, title: str, text: str) -> None:
        self._run.alert(title, text, level="WARN")

    def close(self) -> None:
        """Sends the rest; raises TimeoutError if that takes too long."""
        errors: list[Exception] = []

        def finish() -> None:
            try:
                self._run.finish()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=finish, name="wandb finish", daemon=True)
        thread.start()
        thread.join(FINISH_SECONDS)
        if thread.is_alive():
            raise TimeoutError(f"not finished after {FINISH_SECONDS} s")
        if errors:
            raise errors[0]


def check_sinks(config: Config) -> None:
    """Raises UserError if a sink that the config asks for cannot be opened."""
    if project := config.log.wandb_project:
        import_extra("wandb", f"config.log.wandb_project = {project!r}", "wandb")


class Guarded(Sink):
    """A sink that never ends a run, not even if it cannot be opened: what it cannot write is lost, and said.

    A file is tried again, since space may be freed; anything else is dropped, since each attempt may take long.
    """

    def __init__(self, open_sink: Callable[[], Sink], name: str, warn: Callable[[str], None], *, is_file: bool):
        self._open, self._name, self._warn, self._is_file = open_sink, name, warn, is_file
        self.sink: Sink | None = None
        self._failed, self._lost = False, 0
        self._attempt(lambda sink: None, entries=0)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._attempt(lambda sink: sink.write(step, values))

    def picture(self, step: int, name: str, image: np.ndarray) -> None:
        self._attempt(lambda sink: sink.picture(step, name, image))

    def alert(self, title: str, text: str) -> None:
        self._attempt(lambda sink: sink.alert(title, text))

    def close(self) -> None:
        if self._lost and self._is_file:
            self._warn(f"{self._name}: {self._lost} entries could not be written and are lost")
        if self.sink is not None:
            self._attempt(lambda sink: sink.close(), entries=0)

    def _attempt(self, act: Callable[[Sink], None], entries: int = 1) -> None:
        if self._failed and not self._is_file:
            return
        try:
            if self.sink is None:
                self.sink = self._open()
            act(self.sink)
        except Exception as error:  # of the disk, of a network, of a library
            self._lost += entries
            if not self._failed:
                known = isinstance(error, OSError | UserError)
                reason = disk_reason(error) if known else f"{type(error).__name__}: {error}"
                after = "later writes are tried" if self._is_file else "nothing more is sent there"
                self._warn(f"{self._name}: cannot write ({reason}); training goes on, and {after}")
            self._failed = True


def open_sinks(
    folder: Workdir, config: Config, start_step: int, warn: Callable[[str], None] = lambda text: None
) -> list[Sink]:
    """Opens the sinks that the config group `log` asks for; `warn` is told when one of them cannot write."""
    check_sinks(config)
    metrics, events = folder.metrics, folder.path / "tensorboard"
    sinks: list[Sink] = [Guarded(lambda: MetricsFile(metrics, start_step, warn), str(metrics), warn, is_file=True)]
    if config.log.tensorboard:
        sinks.append(Guarded(lambda: TensorBoard(events, start_step), str(events), warn, is_file=True))
    if project := config.log.wandb_project:
        sinks.append(Guarded(lambda: WandB(project, folder.path, config), "Weights & Biases", warn, is_file=False))
    return sinks
