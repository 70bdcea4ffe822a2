"""Lowers a traced function for absent GPUs, with all shardings that it was written with."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Arguments = Sequence[jax.ShapeDtypeStruct]
AnyMesh = Mesh | AbstractMesh


def count_devices(traced: core.ClosedJaxpr, arguments: Arguments) -> int:
    """Returns how many devices the meshes of a function and its arguments span; 0 without a mesh."""
    meshes = _meshes(traced, arguments)
    return max([len(_device_ids(meshes)), *(mesh.size for mesh in meshes)])


def lower(traced: core.ClosedJaxpr, arguments: Arguments, devices: Sequence[Any]) -> jax.stages.Lowered:
    """Lowers a traced function with every sharding over `devices`, in the order of the numbers of its own devices.

    An argument without a sharding gets the one that the function asks for (`in_shardings`), or is on every device.
    """
    meshes = _meshes(traced, arguments)
    places = dict(zip(_device_ids(meshes), devices, strict=False))

    def absent(mesh: AnyMesh) -> Mesh:
        chosen = [places[one.id] for one in mesh.devices.flat] if isinstance(mesh, Mesh) else devices[: mesh.size]
        return Mesh(np.array(chosen).reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)

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
            specs[i] = specs[i].update(sharding=_with_meshes(given[0], absent))
    moved = core.jaxpr_as_fun(_with_meshes(traced, absent))
    context = jax.sharding.get_abstract_mesh()
    with contextlib.nullcontext() if context.empty else jax.set_mesh(absent(context)):
        return jax.jit(moved, donate_argnums=donated).lower(*specs)


def _device_ids(meshes: Sequence[AnyMesh]) -> list[int]:
    return sorted({one.id for mesh in meshes if isinstance(mesh, Mesh) for one in mesh.devices.flat})


def _meshes(traced: core.ClosedJaxpr, arguments: Arguments) -> list[AnyMesh]:
    """Returns the meshes of a function, of its arguments and of `jax.set_mesh`."""
    found: list[AnyMesh] = []

    def note(mesh: AnyMesh) -> AnyMesh:
        found.append(mesh)
        return mesh

    _with_meshes((traced, [one.sharding for one in arguments]), note)
    context = jax.sharding.get_abstract_mesh()
    return found if context.empty else [*found, context]


def _with_meshes(value: Any, change: Callable[[AnyMesh], AnyMesh]) -> Any:
    """Returns a jaxpr, a sharding or a tree of them with other meshes in its shardings and calls."""
    if isinstance(value, NamedSharding) and not value.mesh.empty:
        return NamedSharding(change(value.mesh), value.spec)
    if isinstance(value, Mesh) and not value.empty:
        return change(value)
    if isinstance(value, core.ClosedJaxpr) and value.jaxpr is not value:  # since JAX 0.12 every jaxpr is closed
        return core.ClosedJaxpr(_with_meshes(value.jaxpr, change), value.consts)
    if isinstance(value, core.Jaxpr):
        return value.replace(eqns=[one.replace(params=_with_meshes(one.params, change)) for one in value.eqns])
    if type(value) in (tuple, list):
        return type(value)(_with_meshes(part, change) for part in value)
    if type(value) is dict:
        return {key: _with_meshes(part, change) for key, part in value.items()}
    return value
