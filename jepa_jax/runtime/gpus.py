"""What NVML says of the GPUs that this process may use; without a driver there is none, and that is no error."""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from jepa_jax.base.errors import UserError

# Bits of NVML's clock event reasons that slow a GPU down against its will: hardware slowdown, two thermal limits, the
# power brake. A power cap (0x4) is the normal state of a busy GPU and no fault.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
GPU_FIELDS = (
    "memory_used_gb", "memory_total_gb", "utilization", "temperature_c", "power_watts", "clock_mhz", "max_clock_mhz",
    "throttled",
)  # fmt: skip
POOL_FRACTION = 0.75  # of a GPU's memory that JAX takes unless a variable sets another share
POOL_VARIABLE, OLD_POOL_VARIABLE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


class Gpus:
    """The visible GPUs, in the order that JAX numbers them."""

    def __init__(self, nvml: Any = None, environment: Mapping[str, str] = os.environ):
        self.problem = ""  # why there are none
        self._nvml, self._handles = None, []
        try:
            if nvml is None:
                nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            self._handles = visible_handles(nvml, environment.get("CUDA_VISIBLE_DEVICES"))
        except Exception as error:  # NVML raises errors of its own; whatever it is, a run goes on without it
            self.problem = f"{type(error).__name__}: {error}"

    def __len__(self) -> int:
        return len(self._handles)

    def read(self) -> list[dict[str, float | None]]:
        """GPU_FIELDS of each GPU; what a GPU does not tell is None."""
        return [self._read_one(handle) for handle in self._handles]

    def _read_one(self, handle: Any) -> dict[str, float | None]:
        nvml: Any = self._nvml
        memory = _ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        reasons = _ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return {
            "memory_used_gb": memory and memory.used / 2**30,
            "memory_total_gb": memory and memory.total / 2**30,
            "utilization": _ask(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            "temperature_c": _ask(
                lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            ),
            "power_watts": _ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "clock_mhz": _ask(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            "max_clock_mhz": _ask(lambda: float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))),
            "throttled": None if reasons is None else float(bool(reasons & THROTTLED)),
        }

    def close(self) -> None:
        if self._nvml is not None:
            _ask(self._nvml.nvmlShutdown)
            self._nvml, self._handles = None, []


def only_gpu(index: int | None, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables by which a process sees one GPU alone: number `index` of those that this one may use.

    CUDA numbers GPUs by speed unless it is told to number them as NVML and nvidia-smi do.
    """
    if index is None:
        return {}
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    name = str(index)
    if visible is not None:
        names = [part.strip() for part in visible.split(",") if part.strip()]
        if index >= len(names):
            raise UserError(
                f"--gpu_index = {index}: CUDA_VISIBLE_DEVICES = {visible} leaves {len(names)} GPUs, numbered from 0; "
                "use one of them"
            )
        name = names[index]
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": name}


def pool_fraction(environment: Mapping[str, str]) -> float:
    """Returns the share of a GPU's memory that JAX takes for its pool."""
    given = [name for name in (POOL_VARIABLE, OLD_POOL_VARIABLE) if environment.get(name)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are both set, which JAX refuses; unset the second")
    for name in given:
        try:
            return float(environment[name])
        except ValueError:
            raise UserError(f"{name} = {environment[name]}: not a number; give a share of 1, or unset it") from None
    return POOL_FRACTION


def visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """Handles of the GPUs that CUDA_VISIBLE_DEVICES names by number or UUID, or of all."""
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for name in filter(None, (part.strip() for part in visible.split(","))):
        if name.startswith("-"):
            break  # CUDA ignores whatever follows an invalid number
        by_number = name.isdigit()
        handles.append(
            nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else nvml.nvmlDeviceGetHandleByUUID(name)
        )
    return handles


def _ask(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception:  # a field that this GPU or driver does not know
        return None
