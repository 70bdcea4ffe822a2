"""Runs the parts of the check, each in a process of its own, and makes the file of the card.

    python -m jepa_jax.device_check.check PART FILE MINUTES

is the process of a part.
"""

import dataclasses
import importlib
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jepa_jax.base.files import read_json, write_json
from jepa_jax.base.processes import python_path, run
from jepa_jax.device_check.findings import Findings
from jepa_jax.runtime import provenance
from jepa_jax.runtime.platforms import import_jax

SCHEMA_VERSION = 1
GRACE_SECONDS = 10.0
MOST_MINUTES = 30.0  # of one part, after which it counts as stuck, unless more were given
PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"
Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part; `least_gpus` are needed for it to make sense."""

    title: str
    module: str
    function: str = "run"
    least_gpus: int = 0


PARTS: Mapping[str, Part] = {
    "identity": Part("card, driver, clocks and rates", "rates"),
    "numerics": Part("kernels and steps against float32 on the CPU", "numerics"),
    "program": Part("what XLA made of a step", "program"),
    "profiler": Part("traced time, and a sleep that was injected", "profiler"),
    "memory": Part("the largest batch that fits, and one beyond", "commands", "run_memory", least_gpus=1),
    "speed": Part("four fixed steps", "speed", least_gpus=1),
    "resume": Part("kill -9, restart, same bits", "commands", "run_resume"),
    "devices": Part("one GPU against all", "program", "run_devices", least_gpus=2),
}


def check_device(names: Sequence[str], minutes: float, gpus: int, tell: Tell) -> dict[str, Any]:
    """Returns the content of card.json: every part with its findings, and what they measured.

    Args:
      names: parts to run.
      minutes: how thorough to be; parts that would begin later are left out, which counts as a failure.
      gpus: how many are visible; parts that need more are left out.
      tell: gets a line when something is known.
    """
    deadline = time.monotonic() + 60 * minutes
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="jepa_jax_check_") as folder:
        for name in names:
            if gpus < PARTS[name].least_gpus:
                parts[name] = {"status": LEFT_OUT, "why": f"needs {PARTS[name].least_gpus} GPU, there are {gpus}"}
            elif time.monotonic() > deadline:
                parts[name] = {"status": FAILED, "why": f"{minutes:g} minutes are over; give more --minutes"}
            else:
                parts[name] = run_process(name, minutes, pathlib.Path(folder))
            for line in part_lines(name, parts[name]):
                tell(line)
    known = parts.get("identity", {})
    return {
        "schema_version": SCHEMA_VERSION,
        "command": provenance.command(),
        "versions": provenance.versions(),
        "passed": all(part["status"] != FAILED for part in parts.values()),
        "gpu": known.get("gpu"),
        "identity": known.get("identity"),
        "rates": known.get("rates"),
        "measurements": parts.get("speed", {}).pop("measurements", []),
        "parts": parts,
    }


def run_process(name: str, minutes: float, folder: pathlib.Path) -> dict[str, Any]:
    """Runs a part as a process; a part that dies or hangs has failed."""
    most = max(MOST_MINUTES, minutes)
    file, began = folder / f"{name}.json", time.monotonic()
    command = [sys.executable, "-m", "jepa_jax.device_check.check", name, str(file), f"{minutes:g}"]
    environment = {"PYTHONPATH": python_path()}
    ended = run(command, folder / name, environment=environment, timeout=60 * most, grace=GRACE_SECONDS)
    seconds = time.monotonic() - began
    if not file.exists():
        why = f"no answer in {most:g} minutes" if ended.timed_out else ended.message
        return {"status": FAILED, "seconds": seconds, "why": f"exit code {ended.exit_code}: {why}"}
    found = read_json(file, "run the check again")
    holds = all(finding["holds"] for finding in found["findings"])
    return {"status": PASSED if holds else FAILED, "seconds": seconds, **found}


def part_lines(name: str, part: dict[str, Any]) -> list[str]:
    """Returns the rows of the table about a part: its verdict, and what it has found that does not hold."""
    seconds = f"{part['seconds']:.0f} s" if "seconds" in part else ""
    findings = part.get("findings", [])
    checked = [finding for finding in findings if finding["limit"]]
    text = part.get("why") or f"{sum(one['holds'] for one in checked)} of {len(checked)} hold"
    lines = [f"{part['status']:<9} {name:<9} {seconds:>6}  {PARTS[name].title}: {text}"]
    lines += [f"    {one['what']} = {shown(one['found'])}, {one['limit']}" for one in findings if not one["holds"]]
    if name in ("identity", "speed"):
        lines += [f"    {one['what']} = {shown(one['found'])}" for one in findings if not one["limit"]]
    return lines


def shown(value: float | str | None) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def run_part(name: str, minutes: float) -> dict[str, Any]:
    """Runs a part in this process; returns its findings."""
    part, findings = PARTS[name], Findings()
    module = importlib.import_module(f"jepa_jax.device_check.{part.module}")
    try:
        getattr(module, part.function)(findings, minutes)
    except Exception as error:  # of whatever the device, its driver or a library raises
        findings.true("no error", False, f"{type(error).__name__}: {str(error)[:400]}")
    return findings.to_dict()


def main() -> None:
    name, file, minutes = sys.argv[1:]
    import_jax()
    from jepa_jax.runtime.start import start_compile_cache

    start_compile_cache()
    write_json(pathlib.Path(file), run_part(name, float(minutes)))


if __name__ == "__main__":
    main()
