"""GPUs as data (`hardware.toml`), found by name or by what JAX calls them, and described to XLA's compiler."""

import dataclasses
import difflib
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_toml

TABLE_FILE = pathlib.Path(__file__).with_name("hardware.toml")
# Far more than any card has: told the real size, XLA would recompute values to fit and hide the true need.
UNLIMITED_BYTES = 2**42
# Of a multiprocessor, by compute capability: shared memory in all and for one block that asks, threads, float32 units.
MULTIPROCESSORS = {
    (8, 0): (167936, 166912, 2048, 64),
    (8, 6): (102400, 101376, 1536, 128),
    (8, 9): (102400, 101376, 1536, 128),
    (9, 0): (233472, 232448, 2048, 128),
    (10, 0): (233472, 232448, 2048, 128),
    (12, 0): (102400, 101376, 1536, 128),
}
WHOLE = ("cores", "memory_bytes", "l2_bytes")
TOPOLOGY = re.compile(r"(\d+)x(\d+)x(\d+)")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """An entry of the table; units are in its keys."""

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

    def tflops(self, precision: str) -> float:
        """Of matrix products in `train.precision`; float32 ones run as TF32, JAX's default on GPUs."""
        return self.bf16_tflops if precision == "bfloat16" else self.tf32_tflops


def load_table(extra: str | pathlib.Path | None = None) -> dict[str, Gpu]:
    """The GPUs of `hardware.toml`, and those of a file of the user's, which come first."""
    table = _read_table(TABLE_FILE)
    return table if not extra else table | _read_table(pathlib.Path(extra))


def _read_table(path: pathlib.Path) -> dict[str, Gpu]:
    entries = read_toml(path, str(path), "name a TOML file of GPUs")
    return {key: _parse_gpu(path, key, values) for key, values in entries.items()}


def _parse_gpu(path: pathlib.Path, key: str, values: Any) -> Gpu:
    fields = [field.name for field in dataclasses.fields(Gpu) if field.name != "key"]
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: {key} = {values!r}: a GPU is a table [{key}] with {', '.join(fields)}")
    for name in values:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            raise UserError(
                f"{path}: [{key}] {name}: unknown; " + (f"did you mean {close[0]}?" if close else "remove it")
            )
    for name in fields:
        if name not in values:
            raise UserError(f"{path}: [{key}] {name}: missing; see {TABLE_FILE.name} for an example")
        if name in WHOLE and not (_positive(values[name]) and isinstance(values[name], int)):
            raise UserError(f"{path}: [{key}] {name} = {values[name]!r}: must be a whole number above 0")
        if name not in ("name", "compute_capability") and not _positive(values[name]):
            raise UserError(f"{path}: [{key}] {name} = {values[name]!r}: must be a number above 0")
    capability = values["compute_capability"]
    capability = tuple(capability) if isinstance(capability, list) else capability
    if capability not in MULTIPROCESSORS:
        known = ", ".join(str(list(c)) for c in MULTIPROCESSORS)
        raise UserError(f"{path}: [{key}] compute_capability = {values['compute_capability']!r}: not one of {known}")
    return Gpu(key, **{**values, "name": str(values["name"]), "compute_capability": capability})


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def find_gpus(names: Sequence[str], table: Mapping[str, Gpu]) -> list[Gpu]:
    """The named GPUs; names may be joined by commas."""
    found = []
    for name in (part.strip() for joined in names for part in joined.split(",")):
        if name not in table:
            close = difflib.get_close_matches(name, table, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(f"--gpu={name}: unknown; {hint}known are {', '.join(table)}; --gpu_table=FILE adds others")
        found.append(table[name])
    return found


def gpu_of_device(kind: str, memory_bytes: int | None, table: Mapping[str, Gpu]) -> Gpu | None:
    """The entry for what JAX calls a device, e.g. "NVIDIA GeForce RTX 4090"; the nearest memory if several match."""

    def words(name: str) -> str:
        return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())

    matches = [gpu for gpu in table.values() if words(gpu.name) == words(kind)]
    if not matches:
        return None
    return min(matches, key=lambda gpu: abs(gpu.memory_bytes - (memory_bytes or gpu.memory_bytes)))


def num_devices(topology: str) -> int:
    """Of "slices x hosts x GPUs a host", e.g. 1x1x8."""
    return math.prod(_counts(topology))


def num_hosts(topology: str) -> int:
    slices, hosts, _ = _counts(topology)
    return slices * hosts


def _counts(topology: str) -> list[int]:
    match = TOPOLOGY.fullmatch(topology)
    counts = [int(part) for part in match.groups()] if match else [0]
    if min(counts) < 1:
        raise UserError(f"--topology={topology}: write slices x hosts x GPUs a host, e.g. 1x1x8")
    return counts


def target_config(gpu: Gpu) -> str:
    """The text of XLA's `GpuTargetConfigProto` for this GPU, with memory without end."""
    major, minor = gpu.compute_capability
    shared, shared_optin, threads, units = MULTIPROCESSORS[gpu.compute_capability]
    name = json.dumps(gpu.name)
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_optin}
  threads_per_core_limit: {threads} core_count: {gpu.cores} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {round(gpu.bandwidth_gb_per_second * 1e9)} l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz} device_memory_size: {UNLIMITED_BYTES}
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  name: {name} runtime_version: "12.9.0" driver_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: {name}
"""
