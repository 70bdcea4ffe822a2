"""The NVIDIA GPUs that this process may use, as NVML reports them; without a driver there are none."""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from jepa_jax.base.errors import UserError

# Bits of NVML's clock event reasons that slow a GPU down because of a fault: hardware slowdown, two thermal limits, the
# power brake. A power cap (0x4) is the normal state of a busy GPU.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
GPU_FIELDS = (
    "memory_used_gb", "memory_total_gb", "utilization", "temperature_c", "power_watts", "clock_mhz", "max_clock_mhz",
    "throttled",
)  # fmt: skip


class Gpus:
    """The visible GPUs, in the order in which JAX numbers them; `problem` says why there are none."""

    def __init__(self, nvml: Any = None, environment: Mapping[str, str] = os.environ):
        self.problem = ""
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            nvml = nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            self._handles = visible_handles(nvml, environment.get("CUDA_VISIBLE_DEVICES"))
        except Exception as error:  # NVML's own errors, a missing library: a run continues without GPU readings
            self.problem = f"{type(error).__name__}: {error}"

    def __len__(self) -> int:
        return len(self._handles)

    def read(self) -> list[dict[str, float | None]]:
        """Returns GPU_FIELDS of each GPU; None for what a GPU does not report."""
        return [self._read_one(handle) for handle in self._handles]

    def _read_one(self, handle: Any) -> dict[str, float | None]:
        nvml = self._nvml
        memory = _ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        reasons = _ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return {
            "memory_used_gb": memory and memory.used / 2**30,
            "memory_total_gb": memory and memory.total / 2**30,
            "utilization": _ask(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            "temperature_c": _ask(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
            "power_watts": _ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "clock_mhz": _ask(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            "max_clock_mhz": _ask(lambda: float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))),
            "throttled": None if reasons is None else float(bool(reasons & THROTTLED)),
        }

    def first_name_and_memory(self) -> tuple[str | None, int | None]:
        """Returns name and bytes of memory of the first GPU."""
        if not self._handles:
            return None, None
        name = _ask(lambda: self._nvml.nvmlDeviceGetName(self._handles[0]))
        memory = _ask(lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handles[0]).total)
        return name.decode() if isinstance(name, bytes) else name, memory

    def close(self) -> None:
        """Releases NVML; afterwards there are no GPUs."""
        if self._nvml is not None:
            _ask(self._nvml.nvmlShutdown)
            self._nvml, self._handles = None, []


def first_gpu(gpu_index: int | None) -> tuple[str | None, int | None]:
    """Returns name and bytes of memory of the first GPU that a process restricted to `gpu_index` sees."""
    gpus = Gpus(environment=os.environ | only_gpu(gpu_index))
    try:
        return gpus.first_name_and_memory()
    finally:
        gpus.close()


def only_gpu(index: int | None, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns variables that restrict a process to GPU number `index` of those that this process may use.

    CUDA numbers GPUs by speed unless told to number them as NVML and nvidia-smi do.
    """
    if index is None:
        return {}
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    name = str(index)
    if visible is not None:
        names = _names(visible)
        if index >= len(names):
            raise UserError(
                f"--gpu_index = {index}: CUDA_VISIBLE_DEVICES = {visible} leaves {len(names)} GPUs, numbered from 0; "
                "use one of them"
            )
        name = names[index]
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": name}


def visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """Returns handles of the GPUs that CUDA_VISIBLE_DEVICES lists by number or UUID, or of all if it is not set."""
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for name in _names(visible):
        if name.startswith("-"):
            break  # CUDA ignores whatever follows an invalid number
        by_number = name.isdigit()
        handles.append(
            nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else nvml.nvmlDeviceGetHandleByUUID(name)
        )
    return handles


def _names(visible: str) -> list[str]:
    return [part.strip() for part in visible.split(",") if part.strip()]


def _ask(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception:  # a field that this GPU or driver does not know
        return None
