"""Which GPUs CUDA shows to a process, by UUID.

NVML counts all GPUs of a machine by PCI bus. CUDA counts those that CUDA_VISIBLE_DEVICES leaves, the fastest first
unless CUDA_DEVICE_ORDER=PCI_BUS_ID, and a MIG instance in place of the GPU that it is a part of. Numbers therefore do
not identify a GPU; UUIDs do. A process in which CUDA runs asks it (`cuda_uuids`); one that must not start CUDA, because
it decides what others will see, follows CUDA's rules (`visible_cards`).
"""

import ctypes
import dataclasses
import uuid
from collections.abc import Mapping
from typing import Any

VISIBLE, ORDER, BY_BUS = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PCI_BUS_ID"


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
    own = _text(ask(nvml, "nvmlDeviceGetUUID", handle))
    mode = ask(nvml, "nvmlDeviceGetMigMode", handle)
    if not mode or not mode[0]:
        return [Card(own, handle, handle, (own,))]
    instances = []
    for index in range(ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        if part is not None:
            name = _text(ask(nvml, "nvmlDeviceGetUUID", part))
            gpu, compute = (ask(nvml, f"nvmlDeviceGet{kind}InstanceId", part) for kind in ("Gpu", "Compute"))
            instances.append(Card(name, part, handle, (name, f"MIG-{own}/{gpu}/{compute}", own)))
    return instances


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name or "")


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
