"""The device mesh: its axes, and the layout of batches on it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config

BATCH_AXES = ("data", "fsdp")  # every device holds a part of the batch


def make_mesh(data: int, fsdp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh with axes `data` and `fsdp`.

    Args:
        data: size of the axis; -1 uses all devices that `fsdp` leaves.
        fsdp: number of devices that share one copy of the parameters; -1 uses all that `data` leaves.
        devices: devices of another machine to compile for; by default those of this process.
    """
    devices = jax.devices() if devices is None else devices
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
    """Raises UserError unless batches of training and evaluation divide evenly over the devices."""
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
