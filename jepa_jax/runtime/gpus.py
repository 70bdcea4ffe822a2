"""The NVIDIA GPUs that this process may use: which they are, and their readings by NVML.

A GPU is named as CUDA_VISIBLE_DEVICES lists it: by its number or its UUID. CUDA counts the fastest first, NVML by PCI
bus, unless CUDA_DEVICE_ORDER=PCI_BUS_ID, which `runtime.start` sets before JAX starts.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jepa_jax.base.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Bits of NVML's clock event reasons that slow a GPU down because of a fault: hardware slowdown, two thermal limits, the
# power brake. A power cap (0x4) is the normal state of a busy GPU.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
GPU_FIELDS = (
    "memory_used_gb", "memory_total_gb", "utilization", "temperature_c", "power_watts", "energy_joules", "clock_mhz",
    "max_clock_mhz", "throttled",
)  # fmt: skip


class DriverCard(NamedTuple):
    """What the driver says of a GPU; None for what it does not."""

    name: str | None
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None
    units: int | None  # that add and multiply in float32, of all multiprocessors
    clock_mhz: float | None  # the highest of the multiprocessors
    memory_clock_mhz: float | None
    bus_bits: int | None


NO_CARD = DriverCard(*[None] * len(DriverCard._fields))


def ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """Returns NVML's answer, or None if this GPU or driver does not know it."""
    try:
        return getattr(nvml, question)(*arguments)
    except Exception:  # NVML has an error class for every reason
        return None


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

    def keep(self, places: Sequence[int]) -> None:
        self._handles = [self._handles[place] for place in places]

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def uuids(self) -> list[str]:
        return [str(ask(self._nvml, "nvmlDeviceGetUUID", handle)) for handle in self._handles]

    def read(self) -> list[dict[str, float | None]]:
        """Returns GPU_FIELDS of each GPU; None for what a GPU does not report."""
        return [self._read_one(handle) for handle in self._handles]

    def _read_one(self, handle: Any) -> dict[str, float | None]:
        def read(question: str, *arguments: Any, per: float = 1.0) -> float | None:
            value = ask(nvml, f"nvmlDeviceGet{question}", *arguments)
            return None if value is None else value / per

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

    def first_card(self) -> DriverCard:
        """Returns what the driver says of the first GPU; NO_CARD without one."""
        if not self._handles:
            return NO_CARD
        nvml, handle, whole = self._nvml, self._handles[0], self._whole(self._handles[0])
        memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
        capability = ask(nvml, "nvmlDeviceGetCudaComputeCapability", whole)
        return DriverCard(
            ask(nvml, "nvmlDeviceGetName", whole),
            memory and memory.total,
            capability and tuple(capability),
            ask(nvml, "nvmlDeviceGetNumGpuCores", whole),
            ask(nvml, "nvmlDeviceGetMaxClockInfo", whole, nvml.NVML_CLOCK_SM),
            ask(nvml, "nvmlDeviceGetMaxClockInfo", whole, nvml.NVML_CLOCK_MEM),
            ask(nvml, "nvmlDeviceGetMemoryBusWidth", whole),
        )

    def close(self) -> None:
        if self._nvml is not None:
            ask(self._nvml, "nvmlShutdown")
            self._nvml, self._handles = None, []


def jax_gpus(devices: Sequence[Any], nvml: Any = None) -> Gpus:
    gpus = Gpus(nvml)
    places = [device.local_hardware_id for device in devices if device.platform in ("gpu", "cuda")]
    if places and max(places) < len(gpus):
        gpus.keep(places)
    return gpus


def first_gpu(gpu_index: int | None) -> DriverCard:
    """Returns what the driver says of the first GPU that a process restricted to `gpu_index` sees."""
    return Gpus(environment=os.environ | only_gpu(gpu_index)).first_card()


def list_gpus(environment: Mapping[str, str] = os.environ, nvml: Any = None) -> list[str]:
    """Returns names of the GPUs that this process may use, without starting CUDA.

    They are the entries of CUDA_VISIBLE_DEVICES, or if it is not set, all UUIDs in the order of nvidia-smi.
    """
    if VISIBLE in environment:
        return [name.strip() for name in environment[VISIBLE].split(",") if name.strip()]
    return Gpus(nvml, environment).uuids


def count_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """Returns how many GPUs JAX would use, without starting it."""
    return 0 if environment.get("JAX_PLATFORMS") == "cpu" else len(list_gpus(environment))


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
