"""The mesh and what has to divide over it."""

import dataclasses
from types import SimpleNamespace

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.runtime.mesh import by_machine, check_batch, make_mesh, mesh_warnings


def config(batch_size, accum_steps=1, eval_batch_size=16):
    return SimpleNamespace(
        data=SimpleNamespace(batch_size=batch_size),
        train=SimpleNamespace(accum_steps=accum_steps),
        eval=SimpleNamespace(batch_size=eval_batch_size),
    )


def test_batches_must_divide_over_the_devices():
    mesh = make_mesh(8, 1)
    check_batch(config(32, accum_steps=2), mesh)
    for wrong, message in (
        (config(20), "config.data.batch_size = 20 .* 8 devices; use a multiple of 8"),
        (config(24, accum_steps=2), "config.data.batch_size = 24 in 2 accumulation steps: .* use a multiple of 16"),
        (config(16, eval_batch_size=20), "config.eval.batch_size = 20: not divisible by 8 devices"),
    ):
        with pytest.raises(UserError, match=message):
            check_batch(wrong, mesh)


@dataclasses.dataclass(frozen=True)
class Device:
    process_index: int
    id: int
    platform: str = "gpu"


def devices_of(*counts):
    """Returns devices of machines that have so many each; their numbers alternate between the machines."""
    numbered = [(i, index) for index, count in enumerate(counts) for i in range(count)]
    return [Device(index, number) for number, (_, index) in enumerate(sorted(numbered))]


def test_parameters_are_shared_within_a_machine_and_data_split_between_machines():
    mesh = make_mesh(-1, -1, by_machine(devices_of(4, 4)))
    assert mesh.shape == {"data": 2, "fsdp": 4}
    assert [{device.process_index for device in row} for row in mesh.devices] == [{0}, {1}]
    assert make_mesh(-1, -1, devices_of(8)).shape == {"data": 1, "fsdp": 8}


def test_groups_that_cross_machines_without_need_are_named():
    crossing = make_mesh(3, 2, by_machine(devices_of(3, 3)))
    assert list(mesh_warnings(crossing, 0)) == [
        "config.mesh.fsdp = 2: parameters cross machines at every layer; use a divisor of 3"
    ]
    assert not list(mesh_warnings(make_mesh(1, 8, by_machine(devices_of(4, 4))), 0))  # larger than a machine: asked for


def test_gpus_that_are_seen_and_not_used_are_named():
    gpu = [Device(0, 0)]
    assert "1 of the 8 GPUs of this machine are used" in next(mesh_warnings(make_mesh(1, 1, gpu), 8))
    assert not list(mesh_warnings(make_mesh(1, 1, gpu), 1))
