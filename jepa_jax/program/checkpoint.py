"""Checkpoints: saves are asynchronous and atomic, a restore continues bit for bit, damage is found and named."""

import contextlib
import errno
import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jepa_jax.base.console import QuietConsole
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import disk_error, disk_reason
from jepa_jax.program.checkpoint_writer import UNFINISHED, CheckpointWriter, quiet_about_failed_saves
from jepa_jax.program.checksums import Verdict, newest_whole, read_manifest
from jepa_jax.program.step import TrainState
from jepa_jax.runtime.mesh import whole_array
from jepa_jax.runtime.peers import is_first

NONE, ALL_DAMAGED = -1, -2  # instead of a step
SPARE = 2**20  # bytes of a checkpoint besides its arrays
SAVE_ERRORS = (OSError, ValueError, UserError)  # TensorStore reports a full disk by a ValueError
FIX = "put back copies of these files, or remove the folder checkpoints of the run to start again from step 0"


class Checkpoints:
    """The checkpoints of one run; the newest `keep` of them stay.

    With several processes, all of them make the same calls; the first one decides which checkpoint is the newest whole
    one and whether a save succeeded, and is the only one that renames or removes anything.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        keep: int = 1,
        *,
        read_only: bool = False,
        identity: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] | None = None,
    ):
        """Opens a folder; `identity` is what the manifests of its checkpoints say besides their step."""
        self.directory, self._keep, self._identity = directory, keep, dict(identity or {})
        self._warn = warn or QuietConsole().warn
        self.damaged: list[Verdict] = []  # newer than the newest whole one
        self._newest: int | None = None  # step of the newest whole one on disk
        self._saving: int | None = None  # being written
        self._failed: tuple[Exception, pathlib.Path] | None = None  # why the last save failed, and where
        self._told = False  # whether somebody was told
        self._writer: CheckpointWriter | None = None  # opened by the first save
        self._reader = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(
                state=ocp.StandardCheckpointHandler(),
                progress=ocp.JsonCheckpointHandler(),
                evaluated_stats=ocp.StandardCheckpointHandler(),
            )
        )
        self._stack = contextlib.ExitStack()
        if not read_only:
            self._remove_unfinished()  # left by a process that was killed
        self._find()

    def _find(self) -> None:
        """Looks for the newest whole checkpoint; what the first process finds counts for all."""
        found, self.damaged = newest_whole(self.directory) if is_first() else (None, [])
        step = _of_first_process(found.step if found else ALL_DAMAGED if self.damaged else NONE)
        self._newest = None if step < 0 else step
        self._verified = bool(_of_first_process(found is None or found.verified))
        self.all_damaged = step == ALL_DAMAGED
        if not self._verified:
            self._warn(f"{self._folder()}: has no checksums (of an earlier version), so damage would go unnoticed")

    def manifest(self) -> dict[str, Any]:
        """Returns what the newest whole checkpoint says of itself; see `program.identity`."""
        return read_manifest(self._folder())

    def _folder(self) -> pathlib.Path:
        return self.directory / f"step_{self.latest_step()}"

    def latest_step(self) -> int | None:
        """Returns the step of the newest whole checkpoint, on disk or being written, or None."""
        return self._newest if self._saving is None else self._saving

    def whole_step(self) -> int | None:
        """Waits for what is being written; returns the step of the newest checkpoint whose files are whole, or None."""
        self._join()
        found, _ = newest_whole(self.directory)
        return found.step if found else None

    def set_aside_damaged(self) -> None:
        """Renames damaged checkpoints, so that they are in nobody's way; nothing is deleted."""
        for verdict in self.damaged:
            target, number = self.directory / f"damaged_{verdict.folder.name}", 1
            while target.exists():
                target, number = self.directory / f"damaged_{verdict.folder.name}.{number}", number + 1
            try:
                verdict.folder.rename(target)
            except OSError as error:
                raise disk_error(error, target) from error
            self._warn(f"{verdict.in_words()}; set aside as {target.name}")
        self.damaged = []

    def save(self, step: int, state: TrainState, progress: dict[str, Any], evaluated_stats: Any = None) -> None:
        """Copies the state and returns; writing continues in the background.

        A save that fails leaves the earlier checkpoints as they are. `warn_if_failed` and the next `save` warn of it,
        `wait` raises it.
        """
        if step == self.latest_step():
            return
        self._join()
        self.warn_if_failed()
        self._failed = None
        self._saving = step
        if failed := self._has_no_place((state, evaluated_stats)) or self._start(state, progress, evaluated_stats):
            self._fail(failed)

    def _has_no_place(self, arrays: Any) -> Exception | None:
        """Returns why a checkpoint will not fit: cheaper than to fail half-way, and all processes agree on it."""
        size = sum(array.nbytes for array in jax.tree.leaves(arrays))
        reason = 0
        if is_first():
            probe = self.directory / f"{self._folder().name}{UNFINISHED}-probe"
            try:
                probe.mkdir(parents=True)
                probe.rmdir()
                if shutil.disk_usage(self.directory).free <= size + SPARE:
                    reason = errno.ENOSPC
            except OSError as error:
                reason = error.errno or errno.EIO
        reason = _of_first_process(reason)
        return OSError(reason, os.strerror(reason)) if reason else None

    def _start(self, state: TrainState, progress: dict[str, Any], evaluated_stats: Any) -> Exception | None:
        """Starts to write; returns why not, or None.

        With several processes an error ends the run: the others wait for this one, and would not know of it.
        """
        if jax.default_backend() == "cpu":
            # There Orbax writes from the arrays themselves. The next step, which is given them to overwrite, would copy
            # them first, while the threads that write keep the cores busy.
            state = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        items: dict[str, Any] = {
            "state": ocp.args.PyTreeSave(_by_path(state)),
            "progress": ocp.args.JsonSave(progress),
        }
        if evaluated_stats is not None:
            items["evaluated_stats"] = ocp.args.PyTreeSave(_by_path(evaluated_stats))
        self._writer = self._writer or CheckpointWriter(self._keep)
        try:
            self._writer.start(self._folder(), items, self._identity | {"step": self._saving})
        except SAVE_ERRORS as error:
            if jax.process_count() == 1:
                return error
            if isinstance(error, ValueError):  # also of a collective operation with a process that is gone
                raise
            raise disk_error(error, self._folder()) from error
        return None

    def _join(self) -> None:
        """Waits until nothing is being written, on all processes."""
        if self._writer is None or self._saving is None:
            return
        failed = None
        try:
            self._writer.wait()
        except SAVE_ERRORS as error:
            failed = error
        reason = _of_first_process(getattr(failed, "errno", 0) or errno.EIO if failed else 0)
        if reason:
            self._fail(failed or OSError(reason, os.strerror(reason)))
        else:
            self._newest, self._saving, self._verified = self._saving, None, True
        self._writer.end()

    def _fail(self, error: Exception) -> None:
        self._failed, self._saving, self._told = (error, self._folder()), None, False
        self._remove_unfinished()
        _of_first_process(0)  # has removed them

    def is_saving(self) -> bool:
        return self._writer is not None and self._writer.is_writing()

    def warn_if_failed(self) -> None:
        """Warns if a save has failed since the last call; does not wait for one that is under way.

        Several processes learn of it at the next save: this one may know of it before the others.
        """
        if jax.process_count() == 1 and not self.is_saving():
            self._join()
        if self._failed is not None and not self._told:
            error, folder = self._failed
            after = "training goes on, and the next save is tried when due"
            self._warn(f"{folder}: could not be saved ({disk_reason(error)}); {after}")
            self._told = True

    def wait(self) -> None:
        """Waits until everything is on disk; raises UserError if the last save failed."""
        self._join()
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise disk_error(*failed) from failed[0]

    def restore(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Returns the newest whole state, laid out like `abstract`, and its progress."""
        self._join()
        if self._writer is not None:  # written by this process, so nobody has read it yet
            self._find()
        if self._newest is None:
            raise no_whole_checkpoint([self])
        wanted = _by_path(abstract)
        self._check_shapes(wanted)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), progress=ocp.args.JsonRestore())
        restored = self._read(lambda path: self._reader.restore(path, args=items))
        return _like(abstract, restored["state"]), restored["progress"]

    def evaluated_stats(self, abstract: Any) -> Any:
        """Returns the statistics that evaluations read, laid out like `abstract`; None if training has the same."""
        if not (self._folder() / "evaluated_stats").is_dir():
            return None
        items = ocp.args.Composite(evaluated_stats=ocp.args.StandardRestore(_by_path(abstract)))
        return _like(abstract, self._read(lambda path: self._reader.restore(path, args=items))["evaluated_stats"])

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of one array of the newest checkpoint without reading it; None if it has no such array."""
        return self._shapes().get(name)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        saved = self._read(lambda path: self._reader.metadata(path).item_metadata["state"])
        return {name: tuple(leaf.shape) for name, leaf in saved.items()}

    def _read(self, read: Callable[[pathlib.Path], Any]) -> Any:
        """Reads from the newest whole checkpoint; what fails in one without checksums is damage."""
        try:
            return read(self._folder().resolve())
        except jax.errors.JaxRuntimeError:
            raise  # memory, not the files
        except Exception as error:
            if self._verified:
                raise
            reason = f"cannot be read ({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]})"
            raise UserError(
                f"{self._folder()}: {reason}, and has no checksums to tell which file is damaged; {FIX}"
            ) from error

    def _check_shapes(self, wanted: dict[str, Any]) -> None:
        """Raises UserError for a checkpoint of another architecture and names the first array that differs."""
        saved, here = self._shapes(), {name: tuple(leaf.shape) for name, leaf in wanted.items()}
        for name in sorted(here.keys() | saved.keys()):
            if here.get(name) != saved.get(name):
                raise UserError(
                    f"{self.directory}: the checkpoint is of another architecture: {name} is "
                    f"{saved.get(name, 'absent')} there and {here.get(name, 'absent')} in this config; "
                    "use the config it was made with, or another --workdir"
                )

    def _remove_unfinished(self) -> None:
        if is_first():
            for folder in self.directory.glob(f"*{UNFINISHED}*"):
                shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        self._stack.enter_context(quiet_about_failed_saves())
        self._stack.callback(self._reader.close)
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        with self._stack:
            if kind is None or jax.process_count() == 1:
                self._join()
            if self._writer is not None:
                # A note of Orbax's own may fail where the folder is gone; whether the save failed is told below.
                with contextlib.suppress(OSError):
                    self._writer.close()  # waits for this process only: perhaps the others go on
        if kind is None:  # otherwise the error that ended the run is the better message
            self.wait()


def no_whole_checkpoint(opened: Sequence[Checkpoints]) -> UserError:
    """Returns the error to raise if none of these folders holds a whole checkpoint."""
    words = [verdict.in_words() for checkpoints in opened for verdict in checkpoints.damaged]
    if not words:
        return UserError(f"{opened[-1].directory}: holds no checkpoint; train first, or check the path")
    return UserError(f"no whole checkpoint is left: {'; '.join(words)}; {FIX}")


def open_whole(directories: Sequence[pathlib.Path]) -> Checkpoints:
    """Returns, for reading only, the first of these folders that holds a whole checkpoint; warns of damaged ones."""
    opened = []
    for directory in directories:
        opened.append(checkpoints := Checkpoints(directory, read_only=True))
        if (step := checkpoints.latest_step()) is not None:
            for verdict in (verdict for one in opened for verdict in one.damaged):
                checkpoints._warn(f"{verdict.in_words()}; {directory / f'step_{step}'} is used instead")
            return checkpoints
    raise no_whole_checkpoint(opened)


def _of_first_process(number: int) -> int:
    """Returns, on all processes, what the first one passes."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number))) if jax.process_count() > 1 else number


def _by_path(tree: Any) -> dict[str, Any]:
    """Returns a flat dict by the path of each leaf, which Orbax stores without knowing our types."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _like(tree: Any, flat: dict[str, Any]) -> Any:
    """Returns a tree with the structure of another one, and the leaves of these paths."""
    return jax.tree.unflatten(jax.tree.structure(tree), [flat[name] for name in _by_path(tree)])


def params_sha256(params: Any) -> str:
    """Returns a digest of the names, shapes and bits of all parameters."""
    digest = hashlib.sha256()
    for path, leaf in sorted(_by_path(params).items()):
        array = whole_array(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
