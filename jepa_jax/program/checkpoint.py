"""Checkpoints, the only file that knows Orbax: saves are asynchronous and atomic, a restore continues bit for bit."""

import contextlib
import hashlib
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import disk_error
from jepa_jax.program.step import TrainState
from jepa_jax.runtime.mesh import whole_array
from jepa_jax.runtime.peers import is_first


class Checkpoints:
    """The checkpoints of one run; the newest `keep` of them stay."""

    def __init__(self, directory: pathlib.Path, keep: int = 1, *, read_only: bool = False):
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            enable_async_checkpointing=True,
            step_prefix="step",
        )
        self.directory = directory
        if not read_only and is_first():
            self._remove_unfinished()  # left by a process that was killed
        handlers = {
            "state": ocp.StandardCheckpointHandler(),
            "progress": ocp.JsonCheckpointHandler(),
            "evaluated_stats": ocp.StandardCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options, item_handlers=handlers)

    def latest_step(self) -> int | None:
        """Returns the step of the newest checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, progress: dict[str, Any], evaluated_stats: Any = None) -> None:
        """Copies the state and returns; writing continues in the background.

        Args:
          step: of the state; nothing happens if the newest checkpoint is of this step.
          state: what training continues from.
          progress: any JSON object.
          evaluated_stats: batch statistics that evaluations read, if they differ from those of training.
        """
        if step == self.latest_step():
            return
        named: dict[str, Any] = {
            "state": ocp.args.StandardSave(_by_path(state)),
            "progress": ocp.args.JsonSave(progress),
        }
        if evaluated_stats is not None:
            named["evaluated_stats"] = ocp.args.StandardSave(_by_path(evaluated_stats))
        items = ocp.args.Composite(**named)
        with self._disk_errors():
            self._manager.save(step, args=items)

    def restore(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Returns the newest state, laid out like `abstract`, and its progress."""
        step = self.latest_step()
        wanted = _by_path(abstract)
        self._check_shapes(wanted)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), progress=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        return _like(abstract, restored["state"]), restored["progress"]

    def evaluated_stats(self, abstract: Any) -> Any:
        """Returns the statistics that evaluations read, laid out like `abstract`; None if training has the same."""
        step = self.latest_step()
        if self._manager.item_metadata(step).get("evaluated_stats") is None:
            return None
        items = ocp.args.Composite(evaluated_stats=ocp.args.StandardRestore(_by_path(abstract)))
        return _like(abstract, self._manager.restore(step, args=items)["evaluated_stats"])

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of one array of the newest checkpoint without reading it; None if it has no such array."""
        return self._saved_shapes().get(name)

    def _saved_shapes(self) -> dict[str, tuple[int, ...]]:
        saved = self._manager.item_metadata(self.latest_step())["state"]
        return _shapes(saved.tree if hasattr(saved, "tree") else saved)

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

    def wait(self) -> None:
        """Waits until everything is on disk."""
        with self._disk_errors():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turns errors of the disk into UserErrors.

        An asynchronous write fails in whatever call comes next, and TensorStore reports it with a ValueError.
        """
        try:
            yield
        except (OSError, ValueError) as error:
            self._remove_unfinished()
            raise disk_error(error, self.directory) from error

    def _remove_unfinished(self) -> None:
        for folder in self.directory.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        try:
            with self._disk_errors():
                self._manager.close()
        except UserError:
            if kind is None:  # otherwise the error that ended the run is the better message
                raise


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
