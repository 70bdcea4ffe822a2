"""Readings of the NVIDIA GPUs that this process may use, by NVML; without a driver there are none."""

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.runtime.visible_gpus import BY_BUS, ORDER, VISIBLE, Card, ask, cuda_uuids, machine_cards, visible_cards

# Bits of NVML's clock event reasons that slow a GPU down because of a fault: hardware slowdown, two thermal limits, the
# power brake. A power cap (0x4) is the normal state of a busy GPU.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
GPU_FIELDS = (
    "memory_used_gb", "memory_total_gb", "utilization", "temperature_c", "power_watts", "energy_joules", "clock_mhz",
    "max_clock_mhz", "throttled",
)  # fmt: skip


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
        name = ask(self._nvml, "nvmlDeviceGetName", card.parent)
        memory = ask(self._nvml, "nvmlDeviceGetMemoryInfo", card.handle)
        return name.decode() if isinstance(name, bytes) else name, memory and memory.total

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
    gpus = Gpus(environment=os.environ | only_gpu(gpu_index))
    try:
        return gpus.first_name_and_memory()
    finally:
        gpus.close()


def list_gpus(environment: Mapping[str, str] = os.environ, nvml: Any = None) -> list[str]:
    """Returns UUIDs of the GPUs that this process may use, without starting CUDA.

    They are in the order of CUDA_VISIBLE_DEVICES, or of nvidia-smi if it is not set.
    """
    by_bus = {} if VISIBLE in environment else {ORDER: BY_BUS}
    gpus = Gpus(nvml, {**environment, **by_bus})
    try:
        return gpus.uuids
    finally:
        gpus.close()


def only_gpu(index: int | None, environment: Mapping[str, str] = os.environ, nvml: Any = None) -> dict[str, str]:
    """Returns variables that restrict a process to GPU number `index` of `list_gpus`, by its UUID.

    Without NVML the GPU is named as CUDA_VISIBLE_DEVICES names it, or by its number.
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
        raise UserError(f"--gpu_index = {index}: {leaves} {len(names)} GPUs, numbered from 0; use one of them")
    else:
        name = str(index)
    return {ORDER: BY_BUS, VISIBLE: name}
