"""Lowers a traced function for absent GPUs, with all shardings that it was written with."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Arguments = Sequence[jax.ShapeDtypeStruct]


def count_devices(traced: core.ClosedJaxpr, arguments: Arguments) -> int:
    """Returns how many devices the meshes of a function and its arguments span; 0 without a mesh."""
    meshes = list(_meshes((traced, arguments, jax.sharding.get_abstract_mesh())))
    return max([len(_device_ids(meshes)), *(mesh.size for mesh in meshes)])


def lower(traced: core.ClosedJaxpr, arguments: Arguments, devices: Sequence[Any]) -> jax.stages.Lowered:
    """Lowers a traced function with every sharding over `devices`, in the order of the numbers of its own devices.

    An argument without a sharding gets the one that the function asks for (`in_shardings`), or is on every device.
    """
    context = jax.sharding.get_abstract_mesh()  # of `jax.set_mesh`
    meshes = list(_meshes((traced, arguments, context)))
    places = dict(zip(_device_ids(meshes), devices, strict=False))

    def absent(mesh: Mesh | AbstractMesh) -> Mesh:
        chosen = [places[one.id] for one in mesh.devices.flat] if isinstance(mesh, Mesh) else devices[: mesh.size]
        return Mesh(np.array(chosen).reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)

    def moved(value: Any) -> Any:
        if isinstance(value, NamedSharding) and not value.mesh.empty:
            return NamedSharding(absent(value.mesh), value.spec)
        if isinstance(value, Mesh) and not value.empty:
            return absent(value)
        if isinstance(value, core.ClosedJaxpr):
            return core.ClosedJaxpr(moved(value.jaxpr), value.consts)
        if isinstance(value, core.Jaxpr):
            return value.replace(eqns=[one.replace(params=moved(one.params)) for one in value.eqns])
        if type(value) in (tuple, list):
            return type(value)(map(moved, value))
        return {key: moved(part) for key, part in value.items()} if type(value) is dict else value

    everywhere = NamedSharding(absent(meshes[0]), PartitionSpec())
    specs = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=everywhere) for one in arguments]
    donated = []
    for i, (variable, argument) in enumerate(zip(traced.jaxpr.invars, arguments, strict=True)):
        wanted = [argument.sharding]
        for equation in traced.jaxpr.eqns:
            if "donated_invars" in equation.params and variable in equation.invars:  # a jitted function takes it
                place = equation.invars.index(variable)
                wanted.append(equation.params["in_shardings"][place])
                donated += [i] if equation.params["donated_invars"][place] else []
        given = [one for one in wanted if isinstance(one, NamedSharding)]
        if given:
            specs[i] = specs[i].update(sharding=moved(given[0]))
    with contextlib.nullcontext() if context.empty else jax.set_mesh(absent(context)):
        return jax.jit(core.jaxpr_as_fun(moved(traced)), donate_argnums=donated).lower(*specs)


def _device_ids(meshes: Sequence[Mesh | AbstractMesh]) -> list[int]:
    return sorted({one.id for mesh in meshes if isinstance(mesh, Mesh) for one in mesh.devices.flat})


def _meshes(value: Any) -> Iterator[Mesh | AbstractMesh]:
    """Yields the meshes of a jaxpr, of arguments, and of the shardings in them."""
    if isinstance(value, NamedSharding):
        value = value.mesh
    if isinstance(value, Mesh | AbstractMesh):
        yield from [] if value.empty else [value]
    elif isinstance(value, jax.ShapeDtypeStruct):
        yield from _meshes(value.sharding)
    elif isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        for equation in value.eqns:
            yield from _meshes(equation.params)
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _meshes(part)
