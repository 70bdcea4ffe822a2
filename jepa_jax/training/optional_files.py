"""Files that a run can do without: one that cannot be written costs a warning."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import disk_reason, write_json
from jepa_jax.profiling.profiler import NullProfiler
from jepa_jax.program.workdir import Workdir


class OptionalFiles:
    """Called with a file, it is a `with` block in which writing that file may fail; each is named in one warning.

    Only a folder that is no longer there ends the run.
    """

    def __init__(self, folder: Workdir, warn: Callable[[str], None]):
        self._folder, self._warn = folder, warn
        self._named: set[str] = set()

    @contextlib.contextmanager
    def __call__(self, what: pathlib.Path) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, ValueError, UserError) as error:
            self._folder.check_still_there()
            if str(what) not in self._named:
                self._named.add(str(what))
                self._warn(f"{what}: could not be written ({disk_reason(error)}); the run goes on without it")

    def write_results(
        self, summary: dict[str, Any], profiler: NullProfiler, write_report: Callable[[pathlib.Path], object]
    ) -> None:
        """Writes profile, summary and report of a run; one without a summary has not finished."""
        folder = self._folder
        folder.check_still_there()
        with self(folder.profile):
            profiler.finish(folder.profile)
        with contextlib.nullcontext() if summary["status"] == "finished" else self(folder.summary):
            write_json(folder.summary, summary)
        with self(folder.report):
            write_report(folder.path)
