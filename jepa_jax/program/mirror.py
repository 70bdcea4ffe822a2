"""A copy of a run elsewhere (`train.mirror`): a machine that is gone with its disk loses nothing but the last steps.

Checkpoints are copied when they are whole, their checksums last: one without them is not there yet. Where the workdir
has no checkpoint, a start fetches the newest whole one of the mirror.
"""

import contextlib
import posixpath
import shutil
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

from jepa_jax.base.errors import UserError
from jepa_jax.program.checksums import CHECKSUMS, step_folders, verify
from jepa_jax.program.workdir import Workdir

POLL_SECONDS = 2.0  # between two looks for what is new
CLOSE_SECONDS = 120.0  # for the last copies, when a run has ended
FETCHED = "fetched-"  # in the names of folders that are being fetched


def open_mirror(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL and the path in it."""
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f"config.train.mirror = {url}: {error}; pip install 'jepa_jax[mirror]'") from None
    except ValueError as error:
        raise UserError(f"config.train.mirror = {url}: {error}; give s3://BUCKET/PATH or gs://BUCKET/PATH") from None


class Mirror:
    """Copies a workdir in the background until the end of the `with` block; a copy that fails is tried again."""

    def __init__(self, url: str, folder: Workdir, warn: Callable[[str], None]):
        self.url, self._folder, self._warn = url, folder, warn
        self._files, self._root = open_mirror(url)
        self._copied: dict[str, tuple[int, int]] = {}  # small files by name, as they were: time of change, size
        self._complained = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._copy_until_closed, name="mirror", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            late = f"copying takes longer than {CLOSE_SECONDS:.0f} s"
            self._warn(f"{self.url}: {late}; the mirror may lack the last state")

    def _copy_until_closed(self) -> None:
        last = False
        while not last:
            last = self._closing.wait(POLL_SECONDS)
            try:
                self.copy()
                self._complained = False
            except Exception as error:  # whatever a driver raises, the run goes on
                if last or not self._complained:
                    again = "" if last else "; training goes on, and it is tried again"
                    self._warn(f"{self.url}: cannot be written ({type(error).__name__}: {error}){again}")
                self._complained = True

    def copy(self) -> None:
        """Copies new checkpoints, then the small files; removes what is left of checkpoints that are gone here."""
        for directory in (self._folder.checkpoints, self._folder.best):
            here = {folder.name: folder for _, folder in step_folders(directory)}
            there = self._checkpoints(directory.name)
            for name in here.keys() - there:
                with contextlib.suppress(FileNotFoundError):  # a newer one has replaced it
                    self._copy_checkpoint(here[name], f"{directory.name}/{name}")
            whole = self._checkpoints(directory.name)
            if here.keys() & whole:
                for name in self._step_names(self._files.glob(self._path(directory.name, "step_*"))) - here.keys():
                    if name in whole:  # what is left without them is no checkpoint
                        self._files.rm(self._path(directory.name, name, CHECKSUMS))
                    self._files.rm(self._path(directory.name, name), recursive=True)
        for path in self._folder.small_files():
            with contextlib.suppress(FileNotFoundError):
                state = path.stat().st_mtime_ns, path.stat().st_size
                if self._copied.get(path.name) != state:
                    self._files.pipe_file(self._path(path.name), path.read_bytes())
                    self._copied[path.name] = state

    def _copy_checkpoint(self, folder: Any, name: str) -> None:
        if not (folder / CHECKSUMS).is_file():
            return
        paths = [path for path in folder.rglob("*") if path.is_file()]
        for path in sorted(paths, key=lambda path: path.name == CHECKSUMS):
            target = self._path(name, path.relative_to(folder).as_posix())
            self._files.makedirs(posixpath.dirname(target), exist_ok=True)
            self._files.put_file(str(path), target)

    def fetch(self) -> str:
        """Fills a workdir without checkpoints; returns what was fetched in words, "" if there is nothing."""
        try:
            fetched = [self._fetch_newest(path) for path in (self._folder.checkpoints, self._folder.best)]
            if any(fetched):
                for path in self._folder.small_files():
                    with contextlib.suppress(FileNotFoundError):
                        path.write_bytes(self._files.cat_file(self._path(path.name)))
        except UserError:
            raise
        except Exception as error:  # whatever a driver raises
            reason = f"cannot be read ({error})"
            raise UserError(f"config.train.mirror = {self.url}: {reason}; check it and its keys") from error
        return ", ".join(filter(None, fetched))

    def _fetch_newest(self, directory: Any) -> str:
        names = self._checkpoints(directory.name)
        damage = []
        for name in sorted(names, key=lambda name: int(name.removeprefix("step_")), reverse=True):
            folder = directory / FETCHED / name
            shutil.rmtree(folder.parent, ignore_errors=True)
            self._files.get(self._path(directory.name, name) + "/", str(folder) + "/", recursive=True)
            verdict = verify(folder)
            if verdict.whole:
                folder.rename(directory / name)
            else:
                damage.append(f"{name}: {verdict.damage[0]}")
                self._warn(f"{self.url}/{directory.name}/{name} is damaged: {verdict.damage[0]}")
            shutil.rmtree(folder.parent, ignore_errors=True)
            if verdict.whole:
                return f"{directory.name}/{name}"
        if damage:
            fix = "put back a good copy, or give another mirror to start from step 0"
            raise UserError(f"{self.url}/{directory.name}: every checkpoint is damaged ({damage[0]}); {fix}")
        return ""

    def _checkpoints(self, directory: str) -> set[str]:
        """Returns the names of the checkpoints of the mirror that have their checksums."""
        self._files.invalidate_cache()
        found = self._files.glob(self._path(directory, "step_*", CHECKSUMS))
        return self._step_names(map(posixpath.dirname, found))

    def _step_names(self, paths: Iterable[str]) -> set[str]:
        names = map(posixpath.basename, paths)
        return {name for name in names if name.removeprefix("step_").isdecimal()}

    def _path(self, *parts: str) -> str:
        return posixpath.join(self._root, *parts)
