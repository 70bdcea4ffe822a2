"""Checkpoints, the only file that knows Orbax: saves are asynchronous and atomic, a restore continues bit for bit.

A checkpoint carries checksums of all its files. They are written by the thread that saves, into the temporary folder
that Orbax then renames: whatever is called `step_N` is whole, or was damaged later, which a restore notices.
"""

import contextlib
import hashlib
import logging
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jepa_jax.base.console import QuietConsole
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import disk_error, sync_folder
from jepa_jax.program.checksums import MARK, Verdict, newest_whole, write_checksums
from jepa_jax.program.step import TrainState
from jepa_jax.runtime.mesh import whole_array

UNFINISHED = ocp.path.atomicity.TMP_DIR_SUFFIX
FIX = "put back a copy of these files, or remove the folder to start again without them"


class ChecksummedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """The temporary folder of a checkpoint: before it gets its name, checksums are added and all is synced to disk.

    Orbax finalizes it in its background thread, on the first process, when all processes have written their parts.
    """

    async def finalize(self) -> None:
        final = self.get_final()
        if UNFINISHED in final.parent.name:  # a part of a checkpoint, whose checksums come with the whole of it
            return await super().finalize()
        unnamed = final.with_name(f"{final.name}{UNFINISHED}-checked")  # recognised as unfinished
        self._final_path = unnamed
        try:
            await super().finalize()  # changes files
        finally:
            self._final_path = final
        write_checksums(pathlib.Path(unnamed))
        unnamed.rename(final)
        sync_folder(pathlib.Path(final.parent))


class Checkpoints:
    """The checkpoints of one run; the newest `keep` of them stay.

    With several processes, all of them make the same calls; the first one decides which checkpoint is the newest whole
    one, and is the only one that renames or removes anything.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        keep: int = 1,
        *,
        read_only: bool = False,
        warn: Callable[[str], None] | None = None,
    ):
        self.directory, self._keep, self._read_only = directory, keep, read_only
        self._warn = warn or QuietConsole().warn
        self.damaged: list[Verdict] = []  # newer than the newest whole one
        self._newest: int | None = None  # whole and on disk
        self._saving: int | None = None  # being written
        self._failed: UserError | None = None  # why the last save failed, until somebody is told
        self._manager: ocp.CheckpointManager | None = None  # opened by the first save: it cannot read damaged ones
        self._reader = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(
                state=ocp.StandardCheckpointHandler(),
                progress=ocp.JsonCheckpointHandler(),
                evaluated_stats=ocp.StandardCheckpointHandler(),
            )
        )
        if not read_only:
            self._remove_unfinished()  # left by a process that was killed
        self._find()

    def _find(self) -> None:
        """Looks for the newest whole checkpoint; what the first process finds counts for all."""
        found, self.damaged = newest_whole(self.directory) if jax.process_index() == 0 else (None, [])
        step = -1 if found is None else found.step
        if jax.process_count() > 1:
            step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
        self._newest, self._verified = (None if step < 0 else step), found is None or found.verified
        if not self._verified:
            self._warn(f"{self._folder()}: has no checksums (of an earlier version), so damage would go unnoticed")

    def _folder(self) -> pathlib.Path:
        return self.directory / f"step_{self._newest}"

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
            verdict.folder.rename(target)
            self._warn(f"{verdict.in_words()}; set aside as {target.name}")
        self.damaged = []

    def save(self, step: int, state: TrainState, progress: dict[str, Any], evaluated_stats: Any = None) -> None:
        """Copies the state and returns; writing continues in the background.

        A save that fails leaves the earlier checkpoints as they are. `wait` raises why, or else the next `save` or
        `warn_if_failed` warns.

        Args:
          step: of the state; nothing happens if the newest checkpoint is of this step.
          state: what training continues from.
          progress: any JSON object.
          evaluated_stats: batch statistics that evaluations read, if they differ from those of training.
        """
        if step == self.latest_step():
            return
        self._join()
        self.warn_if_failed()
        named: dict[str, Any] = {
            "state": ocp.args.PyTreeSave(_by_path(_set_apart(state))),
            "progress": ocp.args.JsonSave(progress),
        }
        if evaluated_stats is not None:
            named["evaluated_stats"] = ocp.args.PyTreeSave(_by_path(evaluated_stats))
        self._saving = step
        try:
            self._manager = self._manager or self._open_manager()
            if not self._manager.save(step, args=ocp.args.Composite(**named), custom_metadata=MARK):
                raise ValueError(f"there is a newer one than step {step}")
        except (OSError, ValueError) as error:
            self._fail(error)

    def _open_manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(self._keep),
            enable_async_checkpointing=True,
            # In the background, a folder that cannot be made would be waited for, for minutes.
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            step_prefix="step",
            temporary_path_class=ChecksummedPath,
        )
        # Compression takes the cores of the steps meanwhile, and trained numbers shrink by a few per cent.
        handlers = {
            "state": ocp.PyTreeCheckpointHandler(use_compression=False),
            "progress": ocp.JsonCheckpointHandler(),
            "evaluated_stats": ocp.PyTreeCheckpointHandler(use_compression=False),
        }
        return ocp.CheckpointManager(self.directory.resolve(), options=options, item_handlers=handlers)

    def _join(self) -> None:
        """Waits until nothing is being written."""
        if self._manager is None or self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:  # of the background; TensorStore reports a full disk by a ValueError
            self._fail(error)
        else:
            self._newest, self._saving, self._verified = self._saving, None, True

    def _fail(self, error: Exception) -> None:
        self._failed, self._saving = disk_error(error, self.directory / f"step_{self._saving}"), None
        self._remove_unfinished()
        if self._manager is not None:
            self._manager.reload()  # it has forgotten those that the failed one would have replaced

    def is_saving(self) -> bool:
        """Returns whether something is still being written."""
        return self._manager is not None and self._saving is not None and self._manager.is_saving_in_progress()

    def warn_if_failed(self) -> None:
        """Warns if a save has failed since the last call; does not wait for one that is under way."""
        if not self.is_saving():
            self._join()
        if self._failed is not None:
            self._warn(f"{self._failed}; training goes on, and the next checkpoint is tried again when it is due")
            self._failed = None

    def wait(self) -> None:
        """Waits until everything is on disk; raises UserError if the last save failed."""
        self._join()
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error

    def restore(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Returns the newest whole state, laid out like `abstract`, and its progress."""
        self._join()
        if self._manager is not None:  # written by this process, so nobody has read it yet
            self._find()
        self.require_whole()
        wanted = _by_path(abstract)
        self._check_shapes(wanted)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), progress=ocp.args.JsonRestore())
        restored = self._read(lambda path: self._reader.restore(path, args=items))
        return _like(abstract, restored["state"]), restored["progress"]

    def require_whole(self) -> None:
        """Raises UserError unless there is a whole checkpoint."""
        if self._newest is None:
            raise no_whole_checkpoint([self])

    def evaluated_stats(self, abstract: Any) -> Any:
        """Returns the statistics that evaluations read, laid out like `abstract`; None if training has the same."""
        if not (self._folder() / "evaluated_stats").is_dir():
            return None
        items = ocp.args.Composite(evaluated_stats=ocp.args.StandardRestore(_by_path(abstract)))
        return _like(abstract, self._read(lambda path: self._reader.restore(path, args=items))["evaluated_stats"])

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of one array of the newest checkpoint without reading it; None if it has no such array."""
        return self._saved_shapes().get(name)

    def _saved_shapes(self) -> dict[str, tuple[int, ...]]:
        saved = self._read(lambda path: self._reader.metadata(path).item_metadata["state"])
        return _shapes(saved.tree if hasattr(saved, "tree") else saved)

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
        saved, here = self._saved_shapes(), _shapes(wanted)
        for name in sorted(here.keys() | saved.keys()):
            if here.get(name) != saved.get(name):
                raise UserError(
                    f"{self.directory}: the checkpoint is of another architecture: {name} is "
                    f"{saved.get(name, 'absent')} there and {here.get(name, 'absent')} in this config; "
                    "use the config it was made with, or another --workdir"
                )

    def _remove_unfinished(self) -> None:
        if jax.process_index() == 0:
            for folder in self.directory.glob(f"*{UNFINISHED}*"):
                shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        self._join()
        with contextlib.suppress(OSError, ValueError):  # what failed is known
            if self._manager is not None:
                self._manager.close()
            self._reader.close()
        if kind is None:  # otherwise the error that ended the run is the better message
            self.wait()


def no_whole_checkpoint(opened: Sequence[Checkpoints]) -> UserError:
    """Returns the error to raise if none of these folders holds a whole checkpoint."""
    words = [verdict.in_words() for checkpoints in opened for verdict in checkpoints.damaged]
    if not words:
        return UserError(f"{opened[-1].directory}: holds no checkpoint; train first, or check the path")
    return UserError(f"no whole checkpoint is left: {'; '.join(words)}; {FIX}")


def open_whole(directories: Sequence[pathlib.Path]) -> Checkpoints:
    """Returns, for reading only, the first of these folders that holds a whole checkpoint; warns of damaged ones.

    Raises:
      UserError: there is no whole checkpoint in any of them.
    """
    opened = []
    for directory in directories:
        opened.append(checkpoints := Checkpoints(directory, read_only=True))
        if (step := checkpoints.latest_step()) is not None:
            for verdict in (verdict for one in opened for verdict in one.damaged):
                checkpoints._warn(f"{verdict.in_words()}; {directory / f'step_{step}'} is used instead")
            return checkpoints
    raise no_whole_checkpoint(opened)


def _set_apart(state: TrainState) -> TrainState:
    """Returns the state, on CPUs a copy of it.

    There Orbax writes from the arrays themselves. The next step, which is given them to overwrite, would have to copy
    them first, and it would do so while the threads that write keep the cores busy.
    """
    if jax.default_backend() != "cpu":
        return state
    return jax.block_until_ready(jax.tree.map(jnp.copy, state))


# Orbax logs the traceback of each failed save; what failed is told by an exception, once.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


def _by_path(tree: Any) -> dict[str, Any]:
    """Returns a flat dict by the path of each leaf, which Orbax stores without knowing our types."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _like(tree: Any, flat: dict[str, Any]) -> Any:
    """Returns a tree with the structure of another one, and the leaves of these paths."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    return jax.tree.unflatten(structure, [flat[_name(path)] for path, _ in paths])


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _shapes(flat: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in flat.items()}


def params_sha256(params: Any) -> str:
    """Returns a digest of the names, shapes and bits of all parameters."""
    digest = hashlib.sha256()
    for path, leaf in sorted(_by_path(params).items()):
        array = whole_array(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
