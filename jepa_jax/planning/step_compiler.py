"""Compiles the training step of configs for GPUs that are not there, each program once.

What is compiled is the program that training runs, over a mesh of absent devices. The facts are kept on disk, by
program and target.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json_or_empty, write_json
from jepa_jax.compiled.flops import Rules, jaxpr_flops
from jepa_jax.compiled.hlo import parse_hlo
from jepa_jax.compiled.kernels import Kernel, read_kernels
from jepa_jax.compiled.moves import transposed_share
from jepa_jax.config.groups import Config
from jepa_jax.config.schema import flatten
from jepa_jax.data.contract import Spec, abstract_batch
from jepa_jax.data.facts import DataFacts
from jepa_jax.data.photos.crops import batch_spec
from jepa_jax.planning.absent_gpus import (
    COMPILER_OPTIONS,
    absent_devices,
    compile_lowered,
    installed_wheels,
    num_devices,
    require_wheels,
    target_config,
)
from jepa_jax.program.build import Program, build_program
from jepa_jax.program.config import changed_config
from jepa_jax.runtime.allocator import POOL_FRACTION
from jepa_jax.runtime.hardware import Gpu, lowering_for
from jepa_jax.runtime.mesh import check_batch, make_mesh
from jepa_jax.runtime.start import cache_folder

PACKAGES = ("jax", "jaxlib", "flax", "optax")  # whose versions decide about a compiled program
SETTINGS = ("jax_default_matmul_precision", "jax_enable_x64")
# The code that makes facts of a program.
READERS = ("planning/step_compiler.py", *(f"compiled/{name}.py" for name in ("hlo", "kernels", "flops", "moves")))
MOST_PARALLEL = 2  # compilations at a time: each takes about a gigabyte


@dataclasses.dataclass(frozen=True)
class Request:
    """A config to compile for a GPU; `topology` is slices x hosts x GPUs per host.

    Attributes:
        data: facts of the data, if they are not those of the compiler.
        elements: of one bucket of the data, if batches are to have its size instead of the largest.
        unlimited: pretends that the GPU has endless memory, so that XLA keeps everything that it can.
        memory_fraction: of the GPU's memory that JAX takes.
    """

    config: Config
    gpu: Gpu
    topology: str = "1x1x1"
    data: DataFacts | None = None
    elements: Spec | None = None
    unlimited: bool = False
    memory_fraction: float = POOL_FRACTION

    @property
    def pool_bytes(self) -> int:
        """Bytes of each device that a step can have."""
        return round(self.memory_fraction * self.gpu.memory_bytes)

    @property
    def devices(self) -> int:
        return num_devices(self.topology)

    def changed(self, changes: Mapping[str, Any]) -> "Request":
        """Returns the request with other values of config keys, e.g. {"data.batch_size": 64}, or another "gpu"."""
        keys = {key: value for key, value in changes.items() if key != "gpu"}
        return dataclasses.replace(self, config=changed_config(self.config, keys), gpu=changes.get("gpu", self.gpu))

    def describe(self) -> str:
        """Returns GPUs and settings in a line."""
        train, mesh = self.config.train, self.config.mesh
        parts = [f"batch {self.config.data.batch_size:,}", train.precision]
        parts += [f"{train.accum_steps} accumulation steps"] if train.accum_steps > 1 else []
        parts += [f"remat {train.remat}"] if train.remat != "none" else []
        parts += [f"FSDP over {mesh.fsdp}"] if mesh.fsdp > 1 else []
        parts += [f"{key} {list(one.shape)}" for key, one in list((self.elements or {}).items())[:1]]
        parts += ["without a limit of memory"] if self.unlimited else []
        count = f"{self.devices} x " if self.devices > 1 else ""
        return f"{count}{self.gpu.name}: {', '.join(parts)}"


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
    transposed_share: float = 0.0  # of `bytes_moved`: what only changes the order of axes

    @property
    def bytes_moved(self) -> int:
        """Bytes that the kernels of a step read and write, as if nothing stayed in the cache."""
        return sum(kernel.bytes * kernel.runs for kernel in self.kernels)

    @property
    def recomputed(self) -> int:
        """Kernels that XLA runs again in a step, because their results would not fit."""
        return sum(kernel.recomputed for kernel in self.kernels)


def program_for(config: Config, data: DataFacts, devices: Sequence[Any]) -> Program:
    """Returns the program that training would run on these devices."""
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, devices)
    check_batch(config, mesh)
    # The search for the largest batch may exceed the data set.
    num_train = max(data.num_train, config.data.batch_size)
    sample = abstract_batch(data.spec, config.data.batch_size)
    return build_program(config, num_train=num_train, num_classes=data.num_classes, sample=sample, mesh=mesh)


def trace_step(program: Program, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
    """Returns the step as a jaxpr that can be lowered; nothing is computed."""
    step: Any = program.train_step
    return step.trace(program.factory.abstract, batch)


def compile_step(program: Program, batch: Mapping[str, jax.ShapeDtypeStruct], traced: Any, lowered: Any) -> StepFacts:
    """Compiles a step, as `trace_step` and its `lower` return it, and reads the facts from the result."""
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
        transposed_share=transposed_share(hlo),
    )


def device_bytes(tree: Any) -> int:
    """Returns the bytes of a tree's arrays on one device, as their shardings lay them out."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


class StepCompiler:
    """Returns the facts of requests, compiling what is not kept in `folder` (None keeps nothing).

    Calls `on_compile` with a description of each program before it is compiled.
    """

    def __init__(
        self, data: DataFacts, folder: pathlib.Path | None, on_compile: Callable[[str], None] = lambda what: None
    ):
        self.data, self.folder, self.on_compile = data, folder, on_compile
        self.compilations = 0

    def all_facts(self, requests: Sequence[Request]) -> list[StepFacts]:
        """Returns facts in the order of the requests; compilations overlap."""
        require_wheels()
        with concurrent.futures.ThreadPoolExecutor(MOST_PARALLEL) as pool:
            # Tracing is Python and stays in this thread; compiling releases the interpreter and overlaps.
            return [future.result() for future in [self._start(request, pool) for request in requests]]

    def _start(self, request: Request, pool: concurrent.futures.Executor) -> "concurrent.futures.Future[StepFacts]":
        """Finds facts kept for the same config, or for another that gives the same program, or compiles."""
        by_config = self._config_digest(request)
        if kept := self._read(by_config):
            return pool.submit(self._write, kept)
        devices = absent_devices(request.gpu, request.topology, request.unlimited, request.memory_fraction)
        data = request.data or self.data
        elements = batch_spec(request.config, request.elements or data.spec)
        batch = abstract_batch(elements, request.config.data.batch_size)
        with lowering_for(request.gpu):
            program = program_for(request.config, data, devices)
            traced = trace_step(program, batch)
            lowered = traced.lower()
        by_program = _digest(request, lowered.as_text(), code_digest(*READERS))
        if kept := self._read(by_program):
            return pool.submit(self._write, kept, by_config)
        self.compilations += 1
        self.on_compile(request.describe())
        return pool.submit(lambda: self._write(compile_step(program, batch, traced, lowered), by_program, by_config))

    def _config_digest(self, request: Request) -> str:
        """Returns a digest that saves tracing; empty for methods and models whose code is not in this package."""
        if ":" in request.config.method.name + request.config.model.name:
            return ""
        config = json.dumps(flatten(request.config), sort_keys=True, default=list)
        return _digest(request, config, f"{request.data or self.data} {request.elements}", code_digest("**/*.py"))

    def _read(self, digest: str) -> StepFacts | None:
        if not self.folder or not digest:
            return None
        return read_facts(self.folder / f"{digest}.json")

    def _write(self, facts: StepFacts, *digests: str) -> StepFacts:
        folder = self.folder
        if not folder:
            return facts
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for digest in filter(None, digests):
                write_facts(folder / f"{digest}.json", facts)
        except (OSError, UserError):
            self.folder = None  # a read-only home costs compilations, not the plan
        return facts


def write_facts(path: pathlib.Path, facts: StepFacts) -> None:
    """Keeps facts, with a checksum: a file of a cache that was damaged must not make a plan."""
    kept = dataclasses.asdict(facts)
    write_json(path, {"sha256": _facts_digest(kept), "facts": kept})


def read_facts(path: pathlib.Path) -> StepFacts | None:
    """Returns facts that were kept; None if they are missing, damaged or of another version."""
    kept = read_json_or_empty(path)
    facts: Any = kept.get("facts")
    if kept.get("sha256") != _facts_digest(facts):
        return None
    try:
        return StepFacts(**facts | {"kernels": [Kernel(*one) for one in facts["kernels"]]})
    except (TypeError, KeyError):
        return None


def _facts_digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def default_folder() -> pathlib.Path:
    """Returns the folder in which plans are kept between runs."""
    return cache_folder() / "plans"


def _digest(request: Request, *program: str) -> str:
    """Returns a digest of a program, its target, and everything else that decides about the compiled result."""
    versions = [f"{name} {metadata.version(name)}" for name in (*PACKAGES, *installed_wheels())]
    settings = [str(jax.config.values[name]) for name in SETTINGS] + [str(COMPILER_OPTIONS)]
    own = target_config(request.gpu, request.unlimited, request.memory_fraction)
    target = [own, request.topology, os.environ.get("XLA_FLAGS", "")]
    return hashlib.sha256("\0".join([*program, *target, *settings, *versions]).encode()).hexdigest()[:32]


@functools.cache
def code_digest(*patterns: str) -> str:
    """Returns a digest of the files of this package that match the patterns."""
    paths = [path for pattern in patterns for path in sorted(pathlib.Path(__file__).parents[1].glob(pattern))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
