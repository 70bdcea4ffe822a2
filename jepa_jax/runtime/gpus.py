"""The NVIDIA GPUs that this process may use: which they are, and their readings by NVML.

NVML and CUDA number GPUs differently; UUIDs identify them. A process in which CUDA runs asks CUDA for them
(`cuda_uuids`); one that must not start CUDA, because it decides what others will see, keeps the names of
CUDA_VISIBLE_DEVICES, or takes the UUIDs of all GPUs from NVML.
"""

import ctypes
import importlib
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Bits of NVML's clock event reasons that slow a GPU down because of a fault: hardware slowdown, two thermal limits, the
# power brake. A power cap (0x4) is the normal state of a busy GPU.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
GPU_FIELDS = (
    "memory_used_gb", "memory_total_gb", "utilization", "temperature_c", "power_watts", "energy_joules", "clock_mhz",
    "max_clock_mhz", "throttled",
)  # fmt: skip


def ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """Returns NVML's answer, or None if this GPU or driver does not know it."""
    try:
        return getattr(nvml, question)(*arguments)
    except Exception:  # NVML has an error class for every reason
        return None


def cuda_uuids(cuda: Any = None) -> list[str] | None:
    """Returns the UUIDs of what CUDA shows this process, in its order, without "GPU-" or "MIG-"; None without CUDA.

    Args:
      cuda: the driver's library; by default the one of this machine.
    """
    try:
        cuda = cuda or ctypes.CDLL("libcuda.so.1")
        count, device = ctypes.c_int(), ctypes.c_int()
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return None
        found = []
        for index in range(count.value):
            raw = (ctypes.c_ubyte * 16)()
            if cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetUuid_v2(ctypes.byref(raw), device):
                return None
            found.append(str(uuid.UUID(bytes=bytes(raw))))
        return found
    except (OSError, AttributeError):  # no driver, or an old one
        return None


class Gpus:
    """The visible GPUs, in the order in which JAX numbers them; `problem` says why there are none."""

    def __init__(
        self, nvml: Any = None, environment: Mapping[str, str] = os.environ, uuids: Sequence[str] | None = None
    ):
        """`uuids`: what CUDA shows this process (`cuda_uuids`); by default the environment says what is visible."""
        self.problem = ""
        self._nvml: Any = None
        self._handles: list[Any] = []  # None: CUDA has one that NVML does not know
        try:
            nvml = nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            if uuids is not None:
                self._handles = [self._handle(f"GPU-{name}") or self._handle(f"MIG-{name}") for name in uuids]
            else:
                listed = environment.get(VISIBLE)
                names = map(str, range(nvml.nvmlDeviceGetCount())) if listed is None else listed.split(",")
                handles = [self._handle(name.strip()) for name in names]
                self._handles = [handle for handle in handles if handle is not None]
        except Exception as error:  # NVML's own errors, a missing library: a run continues without GPU readings
            self.problem = f"{type(error).__name__}: {error}"

    def _handle(self, name: str) -> Any:
        if name.isdigit():
            return ask(self._nvml, "nvmlDeviceGetHandleByIndex", int(name))
        return ask(self._nvml, "nvmlDeviceGetHandleByUUID", name)

    def _whole(self, handle: Any) -> Any:
        """Returns the GPU of a MIG instance, which reports neither temperature nor power nor clocks, or itself."""
        parent = ask(self._nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        return handle if parent is None else parent

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def uuids(self) -> list[str]:
        """UUIDs in full, empty for what NVML does not know."""
        return [str(ask(self._nvml, "nvmlDeviceGetUUID", handle) or "") for handle in self._handles]

    def read(self) -> list[dict[str, float | None]]:
        """Returns GPU_FIELDS of each GPU; None for what a GPU does not report."""
        return [self._read_one(handle) for handle in self._handles]

    def _read_one(self, handle: Any) -> dict[str, float | None]:
        def read(question: str, *arguments: Any, per: float = 1.0) -> float | None:
            value = ask(nvml, f"nvmlDeviceGet{question}", *arguments)
            return None if value is None else value / per

        if handle is None:
            return dict.fromkeys(GPU_FIELDS)
        nvml, parent = self._nvml, self._whole(handle)
        memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
        rates = ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
        reasons = ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", parent)
        return {
            "memory_used_gb": memory and memory.used / 2**30,
            "memory_total_gb": memory and memory.total / 2**30,
            "utilization": rates and float(rates.gpu),
            "temperature_c": read("Temperature", parent, nvml.NVML_TEMPERATURE_GPU),
            "power_watts": read("PowerUsage", parent, per=1000),
            "energy_joules": read("TotalEnergyConsumption", parent, per=1000),
            "clock_mhz": read("ClockInfo", parent, nvml.NVML_CLOCK_SM),
            "max_clock_mhz": read("MaxClockInfo", parent, nvml.NVML_CLOCK_SM),
            "throttled": None if reasons is None else float(bool(reasons & THROTTLED)),
        }

    def first_name_and_memory(self) -> tuple[str | None, int | None]:
        """Returns name and bytes of memory of the first GPU."""
        if not self._handles:
            return None, None
        memory = ask(self._nvml, "nvmlDeviceGetMemoryInfo", self._handles[0])
        return ask(self._nvml, "nvmlDeviceGetName", self._whole(self._handles[0])), memory and memory.total

    def close(self) -> None:
        """Releases NVML; afterwards there are no GPUs."""
        if self._nvml is not None:
            ask(self._nvml, "nvmlShutdown")
            self._nvml, self._handles = None, []


def jax_gpus(devices: Sequence[Any]) -> Gpus:
    """Returns the GPUs behind JAX's local devices, in their order; JAX has started, so CUDA can be asked."""
    found = cuda_uuids() if any(device.platform in ("gpu", "cuda") for device in devices) else None
    if found is None:
        return Gpus()
    places = [device.local_hardware_id for device in devices]
    return Gpus(uuids=[found[place] if place is not None and place < len(found) else "" for place in places])


def first_gpu(gpu_index: int | None) -> tuple[str | None, int | None]:
    """Returns name and bytes of memory of the first GPU that a process restricted to `gpu_index` sees."""
    return Gpus(environment=os.environ | only_gpu(gpu_index)).first_name_and_memory()


def list_gpus(environment: Mapping[str, str] = os.environ, nvml: Any = None) -> list[str]:
    """Returns names of the GPUs that this process may use, without starting CUDA.

    They are the entries of CUDA_VISIBLE_DEVICES, or if it is not set, all UUIDs in the order of nvidia-smi.
    """
    if VISIBLE in environment:
        return [name.strip() for name in environment[VISIBLE].split(",") if name.strip()]
    return Gpus(nvml, environment).uuids


def only_gpu(
    index: int | None, environment: Mapping[str, str] = os.environ, nvml: Any = None, flag: str = "--gpu_index"
) -> dict[str, str]:
    """Returns variables that restrict a process to GPU number `index` of `list_gpus`.

    `flag` is what the message about a number that is too large calls it.
    """
    if index is None:
        return {}
    visible, names = environment.get(VISIBLE), list_gpus(environment, nvml)
    if index < len(names):
        return {VISIBLE: names[index]}
    if names or visible is not None:
        leaves = f"{VISIBLE} = {visible} leaves" if visible is not None else "there are"
        raise UserError(f"{flag} = {index}: {leaves} {len(names)} GPUs, numbered from 0; use one of them")
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE: str(index)}  # without NVML: as nvidia-smi counts
