"""GPUs as data: the table `hardware.toml`, files of the user's and, for a card in neither, what its driver says.

They are searched by key or by JAX's name of a device.
"""

import contextlib
import dataclasses
import difflib
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_toml
from jepa_jax.base.scope import Scope
from jepa_jax.runtime.gpus import DriverCard, Gpus

TABLE_FILE = pathlib.Path(__file__).with_name("hardware.toml")
# By compute capability: shared memory per multiprocessor and per block that asks for it, threads, float32 units.
MULTIPROCESSORS = {
    (7, 0): (98304, 98304, 2048, 64),
    (7, 5): (65536, 65536, 1024, 64),
    (8, 0): (167936, 166912, 2048, 64),
    (8, 6): (102400, 101376, 1536, 128),
    (8, 9): (102400, 101376, 1536, 128),
    (9, 0): (233472, 232448, 2048, 128),
    (10, 0): (233472, 232448, 2048, 128),
    (12, 0): (102400, 101376, 1536, 128),
}
# A GPU of each compute capability that Pallas knows by name; it refuses others that are not there.
KNOWN_TO_PALLAS = {
    (8, 0): "NVIDIA A100",
    (8, 6): "NVIDIA A10",
    (8, 9): "NVIDIA L4",
    (9, 0): "NVIDIA H100",
    (10, 0): "NVIDIA B200",
    (12, 0): "NVIDIA RTX PRO 6000",
}
GEFORCE = "GeForce"  # in the name of cards that run above their advertised clock
ADVERTISED_CLOCK = 0.8  # of the highest that drivers name: GeForce RTX 3090 0.81, 4090 0.81, 5090 0.78
SEEN_BY_CUDA = 0.985  # of the memory that drivers count: RTX 3090 0.987, T4 0.983
lowering_for = Scope("lowering_for")  # the `Gpu`, which need not be there, for which programs are traced
_WHOLE = ("cores", "memory_bytes", "l2_bytes")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """An entry of the table; units are in the names of its fields."""

    key: str
    name: str
    compute_capability: tuple[int, int]
    cores: int
    memory_bytes: int
    bandwidth_gb_per_second: float
    bf16_tflops: float
    tf32_tflops: float
    l2_bytes: int
    clock_ghz: float
    interconnect_gb_per_second: float
    source: str = ""  # where the figures are from

    @property
    def operations_per_second(self) -> float:
        """Additions or multiply-adds of float32 per second outside of matrix products."""
        return self.cores * MULTIPROCESSORS[self.compute_capability][3] * self.clock_ghz * 1e9

    def tflops(self, precision: str) -> float:
        """Returns the rate of matrix products in `train.precision`; JAX runs float32 products as TF32 on GPUs."""
        return self.bf16_tflops if precision == "bfloat16" else self.tf32_tflops


@contextlib.contextmanager
def pallas_target() -> Iterator[None]:
    """Names the GPU of `lowering_for` to kernels traced inside the block: Pallas asks for it since JAX 0.11."""
    import jax

    gpu = lowering_for.value
    if gpu is None or jax.__version_info__ < (0, 11):
        yield
        return
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is not None:  # within `shard_map` it is that of the arrays, and must stay so
        yield
        return
    device = jax.sharding.AbstractDevice(KNOWN_TO_PALLAS[gpu.compute_capability], None, "gpu")
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device)):
        yield


def compute_capability() -> tuple[int, int] | None:
    """Returns that of the GPU that programs are traced for: of `lowering_for`, or of this machine; None without one."""
    if lowering_for:
        return lowering_for.value.compute_capability
    import jax

    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return None
    major, minor = str(device.compute_capability).split(".")
    return int(major), int(minor)


def is_gpu_here() -> bool:
    return not lowering_for and compute_capability() is not None


def load_table(extra: str | pathlib.Path | None = None) -> dict[str, Gpu]:
    """Returns the GPUs of `hardware.toml` and those of a file of the user's, which replace entries of the same key."""
    table: dict[str, Gpu] = {}
    for path in [TABLE_FILE, pathlib.Path(extra)] if extra else [TABLE_FILE]:
        entries = read_toml(path, str(path), "name a TOML file of GPUs")
        table |= {key: _parse_gpu(path, key, values) for key, values in entries.items()}
    return table


def _parse_gpu(path: pathlib.Path, key: str, values: Any) -> Gpu:
    fields = {field.name for field in dataclasses.fields(Gpu)} - {"key"}
    if not isinstance(values, Mapping) or not fields - {"source"} <= values.keys() <= fields:
        wanted = ", ".join(sorted(fields))
        raise UserError(f"{path}: {key}: a GPU is a table [{key}] with {wanted}; see {TABLE_FILE.name} for an example")
    for name in fields - {"name", "compute_capability", "source"}:
        kind = int if name in _WHOLE else int | float
        if not isinstance(values[name], kind) or values[name] <= 0:
            whole = "whole " if kind is int else ""
            raise UserError(f"{path}: [{key}] {name} = {values[name]!r}: must be a {whole}number above 0")
    known = [list(capability) for capability in MULTIPROCESSORS]
    if values["compute_capability"] not in known:
        listed = ", ".join(map(str, known))
        raise UserError(f"{path}: [{key}] compute_capability = {values['compute_capability']!r}: not one of {listed}")
    return Gpu(key, **{**values, "compute_capability": tuple(values["compute_capability"])})


def find_gpus(names: Sequence[str], table: Mapping[str, Gpu]) -> list[Gpu]:
    """Returns the GPUs with these keys; one string may hold several, separated by commas.

    "here" is the first GPU of this machine, "all" the whole table.
    """
    found: list[Gpu] = []
    for name in (part.strip() for joined in names for part in joined.split(",")):
        if name == "all":
            found += table.values()
        elif name == "here":
            found.append(gpu_here(table))
        elif name in table:
            found.append(table[name])
        else:
            close = difflib.get_close_matches(name, table, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(f"--gpu={name}: unknown; {hint}known are {', '.join(table)}; --gpu_table=FILE adds others")
    return found


def gpu_here(table: Mapping[str, Gpu], gpus: Gpus | None = None) -> Gpu:
    gpus = Gpus() if gpus is None else gpus
    name, memory, *_ = gpus.first_card()
    if name is None:
        raise UserError(f"--gpu=here: this machine shows no GPU ({gpus.problem or 'none is visible'}); name one")
    found = gpu_of_device(name, memory, table, gpus)
    if found is None:
        raise UserError(f"--gpu=here: {name} is not in the table, nor known by its driver; --gpu_table=FILE adds it")
    return found


def gpu_of_device(
    kind: str, memory_bytes: int | None, table: Mapping[str, Gpu], gpus: Gpus | None = None
) -> Gpu | None:
    """Returns the GPU that JAX calls `kind`, e.g. "NVIDIA GeForce RTX 4090"; of several, the nearest in memory.

    A card that is not in the table but in this machine is described by its driver.
    """
    matches = [gpu for gpu in table.values() if _plain(gpu.name) == _plain(kind)]
    if matches:
        return min(matches, key=lambda gpu: abs(gpu.memory_bytes - (memory_bytes or gpu.memory_bytes)))
    card = (Gpus() if gpus is None else gpus).first_card()
    return gpu_of_driver(card, table) if card.name and _plain(card.name) == _plain(kind) else None


def gpu_of_driver(card: DriverCard, table: Mapping[str, Gpu]) -> Gpu | None:
    """Returns an entry for a card from what its driver says, or None if that is too little.

    Rates follow from units and clock, in proportion to the card of the table that is most alike: of the same compute
    capability, GeForce or not, nearest in size. Its cache and its connection are taken over.
    """
    if None in card or card.compute_capability not in MULTIPROCESSORS:
        return None
    told: tuple[Any, ...] = card
    name, memory, capability, units, clock, memory_clock, bus = told
    is_geforce, cores = GEFORCE in name, units // MULTIPROCESSORS[capability][3]
    alike = [gpu for gpu in table.values() if gpu.compute_capability == capability]
    if not alike or not cores:
        return None
    like = min(alike, key=lambda gpu: ((GEFORCE in gpu.name) != is_geforce, abs(math.log(gpu.cores / cores))))
    clock_ghz = clock / 1000 * (ADVERTISED_CLOCK if is_geforce else 1.0)
    larger = cores * clock_ghz / (like.cores * like.clock_ghz)
    return dataclasses.replace(
        like,
        key="here",
        name=name,
        cores=cores,
        memory_bytes=round(SEEN_BY_CUDA * memory),
        bandwidth_gb_per_second=2 * memory_clock * bus / 8 / 1000,  # two transfers per cycle
        bf16_tflops=like.bf16_tflops * larger,
        tf32_tflops=like.tf32_tflops * larger,
        clock_ghz=clock_ghz,
        source=f"its driver; rates per multiprocessor and cycle, cache and connection of {like.name}",
    )


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
