"""The process of one trial: measures one combination of settings once.

    python -m jepa_jax.experiments.trial REQUEST.json RESULT.json

reads the request, measures it (`measurement.py`) and writes the result. What the process can explain by itself (a
setting that is refused, memory that ran out, an exception) is a result too; what it does not survive is explained by
the process that started it (`trial_process.py`).
"""

import contextlib
import json
import pathlib
import sys
import traceback
from collections.abc import Callable

from jepa_jax.base import processes
from jepa_jax.base.errors import EXIT_OK, UserError
from jepa_jax.base.files import write_json
from jepa_jax.experiments.rows import CRASHED, OK, OUT_OF_MEMORY, REFUSED, Figures, TrialResult
from jepa_jax.experiments.settings import TrialRequest
from jepa_jax.runtime.memory import is_out_of_memory
from jepa_jax.runtime.platforms import import_jax

Measure = Callable[[TrialRequest], Figures]


def measure_request(request: TrialRequest) -> Figures:
    import_jax()
    from jepa_jax.experiments.measurement import measure  # here, so that a failure to import jax is a result as well

    return measure(request)


def attempt(request: TrialRequest, measure: Measure = measure_request) -> TrialResult:
    """Measures a request in this process; an exception becomes a result with its reason."""
    try:
        return TrialResult(OK, figures=measure(request))
    except UserError as error:
        return TrialResult(REFUSED, str(error))
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".strip()
        return TrialResult(OUT_OF_MEMORY if is_out_of_memory(text) else CRASHED, shortened(text))


def shortened(text: str, length: int = 300) -> str:
    """Returns the first line of a message, cut to `length` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= length else line[: length - 3] + "..."


def main(arguments: list[str], measure: Measure = measure_request) -> int:
    """Runs the trial; checks replace `measure` to make it fail on purpose."""
    request_file, result_file = map(pathlib.Path, arguments)
    processes.end_with_parent()
    with contextlib.suppress(OSError):  # if the machine runs out of memory, the kernel kills the trial, not its parent
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    request = TrialRequest.from_dict(json.loads(request_file.read_text()))
    write_json(result_file, attempt(request, measure).to_dict())
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
