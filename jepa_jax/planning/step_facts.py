"""Facts about one training step that its compilation for a GPU reveals: memory, traffic, operations, types."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jepa_jax.compiled.flops import Rules, jaxpr_flops
from jepa_jax.compiled.hlo import parse_hlo
from jepa_jax.compiled.kernels import Kernel, read_kernels
from jepa_jax.planning.compiling import compile_lowered
from jepa_jax.program.build import Program


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """What the compilation of one step reveals. Bytes are per device; operations are of all devices together."""

    devices: int
    argument_bytes: int  # state and batch
    alias_bytes: int  # outputs that reuse the memory of donated arguments
    temp_bytes: int
    peak_bytes: int  # including arguments
    state_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
    target_bytes: int
    batch_bytes: int
    flops: int
    kernels: list[Kernel]
    collectives: dict[str, list[int]]  # kind: [count per step, bytes that a device sends]
    largest_convolution_bytes: int
    convolutions: int
    encoder_float32_products: list[str]
    host_calls: list[str]

    @property
    def bytes_moved(self) -> int:
        """Bytes that the kernels of a step read and write, as if nothing stayed in the cache."""
        return sum(kernel.bytes * kernel.runs for kernel in self.kernels)

    @property
    def recomputed(self) -> int:
        """Kernels that XLA runs again in a step, because their results would not fit."""
        return sum(kernel.recomputed for kernel in self.kernels)


def trace_step(program: Program, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
    """Returns the step as a jaxpr that can be lowered; nothing is computed."""
    step: Any = program.train_step
    return step.trace(program.factory.abstract, batch)


def compile_step(program: Program, batch: Mapping[str, jax.ShapeDtypeStruct], traced: Any, lowered: Any) -> StepFacts:
    """Compiles a step for the devices of its program's mesh and reads the facts from the result.

    Args:
        program: the program over the devices to compile for.
        batch: shapes of a batch.
        traced: the step as `trace_step` returns it.
        lowered: `traced.lower()`.
    """
    compiled = compile_lowered(lowered)
    memory = compiled.memory_analysis()
    hlo = parse_hlo(compiled.as_text())
    products = hlo.products()
    state = program.factory.abstract
    return StepFacts(
        devices=program.mesh.size,
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        state_bytes=device_bytes(state),
        parameter_bytes=device_bytes(state.params),
        optimizer_bytes=device_bytes(state.opt_state),
        target_bytes=device_bytes([state.target, state.target_stats]),
        batch_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in batch.values()) // program.mesh.size,
        flops=jaxpr_flops(traced.jaxpr.jaxpr, Rules(platform="cuda")),
        kernels=read_kernels(hlo),
        collectives=hlo.collectives(),
        largest_convolution_bytes=hlo.largest_convolution_bytes(),
        convolutions=sum(p.kind == "convolution" for p in products),
        encoder_float32_products=[p.scope for p in products if "encoder" in p.scope and "f32" in p.types],
        host_calls=hlo.host_calls(),
    )


def device_bytes(tree: Any) -> int:
    """Returns the bytes of a tree's arrays on one device, as their shardings lay them out."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
