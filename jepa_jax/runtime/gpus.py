"""The NVIDIA GPUs that this process may use: which they are, and their readings by NVML.

NVML counts all GPUs of a machine by PCI bus. CUDA counts those that CUDA_VISIBLE_DEVICES leaves, the fastest first
unless CUDA_DEVICE_ORDER=PCI_BUS_ID, and a MIG instance in place of the GPU that it is a part of. Numbers therefore do
not identify a GPU; UUIDs do. A process in which CUDA runs asks CUDA (`cuda_uuids`); one that must not start CUDA,
because it decides what others will see, follows CUDA's rules (`visible_cards`).
"""

import ctypes
import dataclasses
import importlib
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError

VISIBLE, ORDER, BY_BUS = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
# Bits of NVML's clock event reasons that slow a GPU down because of a fault: hardware slowdown, two thermal limits, the
# power brake. A power cap (0x4) is the normal state of a busy GPU.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
GPU_FIELDS = (
    "memory_used_gb", "memory_total_gb", "utilization", "temperature_c", "power_watts", "energy_joules", "clock_mhz",
    "max_clock_mhz", "throttled",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU or a MIG instance, with its NVML handle.

    Attributes:
      parent: handle of the GPU that a MIG instance is a part of, else the same: instances report neither temperature
        nor power nor clocks.
      names: under which CUDA_VISIBLE_DEVICES may list it.
    """

    uuid: str
    handle: Any
    parent: Any
    names: tuple[str, ...]


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


def machine_cards(nvml: Any) -> list[list[Card]]:
    """Returns the GPUs of the machine by PCI bus, each as the list of what CUDA can use of it: itself, or instances."""
    handles = [ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(nvml.nvmlDeviceGetCount())]
    return [_parts(nvml, handle) for handle in handles if handle is not None]  # a GPU that is lost has no handle


def _parts(nvml: Any, handle: Any) -> list[Card]:
    own = str(ask(nvml, "nvmlDeviceGetUUID", handle))
    mode = ask(nvml, "nvmlDeviceGetMigMode", handle)
    if not mode or not mode[0]:
        return [Card(own, handle, handle, (own,))]
    instances = []
    for index in range(ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        if part is not None:
            name = str(ask(nvml, "nvmlDeviceGetUUID", part))
            instances.append(Card(name, part, handle, (name, own)))
    return instances


def visible_cards(nvml: Any, environment: Mapping[str, str]) -> list[Card]:
    """Returns what CUDA would show a process with these variables, in its order.

    CUDA ignores an entry of CUDA_VISIBLE_DEVICES that names nothing, and all that follow it.
    """
    order = environment.get(ORDER, "")
    gpus = machine_cards(nvml) if order == BY_BUS else fastest_first(nvml, machine_cards(nvml))
    gpus = [parts for parts in gpus if parts]
    listed = environment.get(VISIBLE)
    if listed is None:
        whole = [parts[0] for parts in gpus if parts[0].handle is parts[0].parent]
        return whole or [parts[0] for parts in gpus[:1]]  # of instances CUDA takes one
    found = []
    for name in listed.split(","):
        card = _named(name.strip(), gpus)
        if card is None:
            break
        found.append(card)
    return found


def _named(name: str, gpus: list[list[Card]]) -> Card | None:
    """Returns the card that an entry of CUDA_VISIBLE_DEVICES means: a number, a UUID or a prefix that only one has."""
    if name.isdigit():
        return gpus[int(name)][0] if int(name) < len(gpus) else None
    if not name.startswith(("GPU-", "MIG-")):
        return None
    matches = [card for parts in gpus for card in parts if any(known.startswith(name) for known in card.names)]
    if len({id(card.parent) for card in matches}) == 1 and name.startswith("GPU-"):
        return matches[0]  # a GPU in instances stands for its first
    return matches[0] if len(matches) == 1 else None


def fastest_first(nvml: Any, gpus: list[list[Card]]) -> list[list[Card]]:
    """Sorts GPUs as CUDA does by default, as far as NVML tells: by cores and clock, equal ones by PCI bus."""

    def speed(parts: list[Card]) -> float:
        handle = parts[0].parent if parts else None
        cores = ask(nvml, "nvmlDeviceGetNumGpuCores", handle) or 0
        return cores * (ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM) or 0)

    return sorted(gpus, key=lambda parts: -speed(parts))


class Gpus:
    """The visible GPUs, in the order in which JAX numbers them; `problem` says why there are none."""

    def __init__(
        self, nvml: Any = None, environment: Mapping[str, str] = os.environ, uuids: Sequence[str] | None = None
    ):
        """`uuids`: what CUDA shows this process (`cuda_uuids`); by default the environment says what is visible."""
        self.problem = ""
        self._nvml: Any = None
        self._cards: list[Card | None] = []  # None: CUDA has one that NVML does not know
        try:
            nvml = nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            if uuids is None:
                self._cards = list(visible_cards(nvml, environment))
            else:
                known = {card.uuid[4:]: card for parts in machine_cards(nvml) for card in parts}
                self._cards = [known.get(name) for name in uuids]
        except Exception as error:  # NVML's own errors, a missing library: a run continues without GPU readings
            self.problem = f"{type(error).__name__}: {error}"

    def __len__(self) -> int:
        return len(self._cards)

    @property
    def uuids(self) -> list[str]:
        """UUIDs in full, empty for what NVML does not know."""
        return [card.uuid if card else "" for card in self._cards]

    def read(self) -> list[dict[str, float | None]]:
        """Returns GPU_FIELDS of each GPU; None for what a GPU does not report."""
        return [self._read_one(card) if card else dict.fromkeys(GPU_FIELDS) for card in self._cards]

    def _read_one(self, card: Card) -> dict[str, float | None]:
        def read(question: str, *arguments: Any, per: float = 1.0) -> float | None:
            value = ask(nvml, f"nvmlDeviceGet{question}", *arguments)
            return None if value is None else value / per

        nvml, parent = self._nvml, card.parent
        memory = ask(nvml, "nvmlDeviceGetMemoryInfo", card.handle)
        rates = ask(nvml, "nvmlDeviceGetUtilizationRates", card.handle)
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
        card = self._cards[0] if self._cards else None
        if card is None:
            return None, None
        memory = ask(self._nvml, "nvmlDeviceGetMemoryInfo", card.handle)
        return ask(self._nvml, "nvmlDeviceGetName", card.parent), memory and memory.total

    def close(self) -> None:
        """Releases NVML; afterwards there are no GPUs."""
        if self._nvml is not None:
            ask(self._nvml, "nvmlShutdown")
            self._nvml, self._cards = None, []


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
    """Returns UUIDs of the GPUs that this process may use, without starting CUDA.

    They are in the order of CUDA_VISIBLE_DEVICES, or of nvidia-smi if it is not set.
    """
    by_bus = {} if VISIBLE in environment else {ORDER: BY_BUS}
    return Gpus(nvml, {**environment, **by_bus}).uuids


def only_gpu(
    index: int | None, environment: Mapping[str, str] = os.environ, nvml: Any = None, flag: str = "--gpu_index"
) -> dict[str, str]:
    """Returns variables that restrict a process to GPU number `index` of `list_gpus`, by its UUID.

    Without NVML the GPU is named as CUDA_VISIBLE_DEVICES names it, or by its number. `flag` is what the message about a
    number that is too large calls it.
    """
    if index is None:
        return {}
    visible, names = environment.get(VISIBLE), list_gpus(environment, nvml)
    if not names and visible is not None:
        names = [part.strip() for part in visible.split(",") if part.strip()]
    if index < len(names):
        name = names[index]
    elif names or visible is not None:
        leaves = f"{VISIBLE} = {visible} leaves" if visible is not None else "there are"
        raise UserError(f"{flag} = {index}: {leaves} {len(names)} GPUs, numbered from 0; use one of them")
    else:
        name = str(index)
    return {ORDER: BY_BUS, VISIBLE: name}
