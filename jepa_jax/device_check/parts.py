"""The parts of the check, and how one of them runs: python -m jepa_jax.device_check.parts PART FILE MINUTES."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jepa_jax.base.files import write_json
from jepa_jax.device_check.findings import Findings


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
    "devices": Part("one GPU against all", "all_devices", least_gpus=2),
}


def run_part(name: str, minutes: float) -> dict[str, Any]:
    """Runs a part in this process; returns its findings."""
    import importlib

    part, findings = PARTS[name], Findings()
    run: Callable[[Findings, float], None] = getattr(
        importlib.import_module(f"jepa_jax.device_check.{part.module}"), part.function
    )
    try:
        run(findings, minutes)
    except Exception as error:  # of whatever the device, its driver or a library raises
        findings.true("no error", False, f"{type(error).__name__}: {str(error)[:400]}")
    return findings.to_dict()


def main() -> None:
    from jepa_jax.runtime.platforms import import_jax
    from jepa_jax.runtime.start import start_compile_cache

    name, file, minutes = sys.argv[1:]
    import_jax()
    start_compile_cache()
    write_json(pathlib.Path(file), run_part(name, float(minutes)))


if __name__ == "__main__":
    main()
