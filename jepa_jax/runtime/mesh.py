"""The device mesh: its axes, and the layout of batches on it."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config
from jepa_jax.runtime.peers import hosts

BATCH_AXES = ("data", "fsdp")  # every device holds a part of the batch


def make_mesh(data: int, fsdp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh with axes `data` and `fsdp`.

    Args:
        data: size of the axis; -1 uses all devices that `fsdp` leaves.
        fsdp: number of devices that share one copy of the parameters; -1 uses all that `data` leaves. They are
            neighbours on one machine, where they can be. If both are -1, those of a machine share one copy.
        devices: devices of another machine to compile for; by default those of all processes.
    """
    devices = by_machine(jax.devices()) if devices is None else devices
    if data == fsdp == -1:
        fsdp = min(collections.Counter(map(_machine, devices)).values())
    for name, size in (("fsdp", fsdp), ("data", data)):
        if -1 in (data, fsdp) and size != -1 and len(devices) % size:
            raise UserError(f"config.mesh.{name} = {size}: does not divide the number of devices, {len(devices)}")
    data, fsdp = (len(devices) // other if size == -1 else size for size, other in ((data, fsdp), (fsdp, data)))
    if data * fsdp > len(devices):
        raise UserError(
            f"config.mesh = {data} x {fsdp} (data x fsdp): there are {len(devices)} devices; use mesh.data = -1"
        )
    if len({device.process_index for device in devices}) > 1 and data * fsdp < len(devices):
        raise UserError(
            f"config.mesh = {data} x {fsdp} (data x fsdp): several processes take all of their {len(devices)} devices; "
            "use mesh.data = -1"
        )
    return Mesh(np.array(devices[: data * fsdp]).reshape(data, fsdp), BATCH_AXES, axis_types=(AxisType.Auto,) * 2)


def by_machine(devices: Sequence[Any]) -> list[Any]:
    """Returns devices in an order in which those of one machine, and of one process, are neighbours."""
    machines = list(dict.fromkeys(map(_machine, devices)))
    return sorted(devices, key=lambda device: (machines.index(_machine(device)), device.process_index, device.id))


def _machine(device: Any) -> Any:
    """Returns the name of the machine of a device; one per process where processes are not connected."""
    names = hosts()
    return names[device.process_index] if len(names) > 1 else device.process_index


def mesh_warnings(mesh: Mesh, visible_gpus: int) -> Iterator[str]:
    """Yields what wastes devices, or their connections, though it works."""
    used = [device for device in mesh.devices.flat if _machine(device) == _machine(jax.local_devices()[0])]
    if used and used[0].platform == "gpu" and len(used) < visible_gpus:
        fix = "check config.mesh, and the processes and GPUs per machine that SLURM or the launcher was asked for"
        yield f"{len(used)} of the {visible_gpus} GPUs of this machine are used; {fix}"
    rows = [len(set(map(_machine, row))) for row in mesh.devices]
    machines = collections.Counter(map(_machine, mesh.devices.flat))
    fsdp = mesh.shape["fsdp"]
    if max(rows) > 1 and fsdp <= max(machines.values()):
        fix = f"use a divisor of {min(machines.values())}"
        yield f"config.mesh.fsdp = {fsdp}: parameters cross machines at every layer; {fix}"


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the layout of a batch: its first axis split over all devices."""
    return NamedSharding(mesh, P(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the layout of an array that every device holds whole."""
    return NamedSharding(mesh, P())


def whole_array(array: Any) -> np.ndarray:
    """Returns the whole array on this host, also when other processes hold parts of it."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def check_batch(config: Config, mesh: Mesh) -> None:
    part = config.data.batch_size // config.train.accum_steps
    if part % mesh.size:
        raise UserError(
            f"config.data.batch_size = {config.data.batch_size} in {config.train.accum_steps} accumulation steps: "
            f"{part} images per step do not divide over {mesh.size} devices; "
            f"use a multiple of {mesh.size * config.train.accum_steps}, or set config.mesh.data"
        )
    if config.eval.batch_size % mesh.size:
        raise UserError(
            f"config.eval.batch_size = {config.eval.batch_size}: not divisible by {mesh.size} devices; use a multiple"
        )
