"""Compiles the training step of a config for GPUs that are not there, and keeps what the compiler says of it.

No GPU, driver or CUDA toolkit is needed: XLA's CUDA compiler and NVIDIA's assembler `ptxas` come as wheels (the extra
`plan`). What is compiled is the program that training runs, over a mesh of devices that only a description stands for.
"""

import concurrent.futures
import copy
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import write_json
from jepa_jax.config.schema import flatten, validate
from jepa_jax.data.contract import abstract_batch
from jepa_jax.data.facts import DataFacts
from jepa_jax.planning.hlo import parse_hlo
from jepa_jax.program.build import Program, build_program
from jepa_jax.program.flops import Rules, jaxpr_flops
from jepa_jax.runtime.hardware import Gpu, num_devices, target_config
from jepa_jax.runtime.mesh import check_batch, make_mesh
from jepa_jax.runtime.platforms import without_driver_remarks
from jepa_jax.runtime.start import cache_folder

FORMAT = 3  # of the cached facts; another one makes old files invisible
WHEELS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")
PTXAS_VERSION = "12.9.86"
READERS = ("planning/gpu_compile.py", "planning/hlo.py", "program/flops.py")
# Without a device XLA cannot try out tiles for Triton's matrix products, and those it takes instead do not always
# compile; cuBLAS needs none. The peak of `rapid` differs by 0.4 %.
COMPILER_OPTIONS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
MOST_PARALLEL = 2  # compilations at a time: each takes about a gigabyte


@dataclasses.dataclass(frozen=True)
class Request:
    """A config to compile for a GPU; `topology` is slices x hosts x GPUs a host."""

    config: Any
    gpu: Gpu
    topology: str = "1x1x1"

    @property
    def devices(self) -> int:
        return num_devices(self.topology)

    def changed(self, **keys: Any) -> "Request":
        """With other values for dotted config keys, "." written "__", or another gpu."""
        config, gpu = copy.deepcopy(self.config), keys.pop("gpu", self.gpu)
        for name, value in keys.items():
            *groups, key = name.split("__")
            group = config
            for part in groups:
                group = group[part]
            group[key] = value
        return Request(config, gpu, self.topology)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What compilation says of one step. Bytes are of one device, operations of all of them together."""

    batch_size: int
    accum_steps: int
    precision: str
    remat: str
    devices: int
    fsdp: int
    argument_bytes: int  # state and batch
    alias_bytes: int  # of the outputs that take the place of donated arguments
    temp_bytes: int
    peak_bytes: int  # arguments included
    state_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
    target_bytes: int
    batch_bytes: int
    flops: int
    bytes_moved: int
    collectives: dict[str, list[int]]  # kind: how often, bytes a device sends
    largest_convolution_bytes: int
    convolutions: int
    encoder_float32_products: list[str]
    host_calls: list[str]
    compile_seconds: float


def require_wheels() -> pathlib.Path:
    """The folder of the wheel's `ptxas`; a missing or ill-matched wheel is answered with the line that installs it."""
    version = metadata.version("jax")
    install = (
        f"pip install jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version} nvidia-cuda-nvcc-cu12=={PTXAS_VERSION}"
    )
    for wheel in WHEELS:
        try:
            found = metadata.version(wheel)
        except metadata.PackageNotFoundError:
            raise UserError(f"{wheel} is not installed: plans need it, but no GPU; {install}") from None
        if wheel.startswith("jax") and found.split(".")[:2] != version.split(".")[:2]:
            raise UserError(f"{wheel} {found} does not go with jax {version}; {install}")
    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    for folder in (pathlib.Path(p) for p in (spec.submodule_search_locations if spec else None) or ()):
        if (folder / "bin" / "ptxas").is_file():
            return folder
    raise UserError(f"nvidia-cuda-nvcc-cu12 has no bin/ptxas; {install} --force-reinstall")


def topology_devices(gpu: Gpu, topology: str) -> list[Any]:
    """Devices to compile for, none of which exists."""
    from jax.experimental import topologies

    require_wheels()
    num_devices(topology)
    with without_driver_remarks():
        jax.devices()  # makes JAX find its plugins
        try:
            description = topologies.get_topology_desc(
                platform="cuda", topology=topology, target_config=target_config(gpu)
            )
        except RuntimeError as error:
            raise UserError(
                f"XLA's CUDA compiler did not start ({error}); without a GPU, start with JAX_PLATFORMS=cpu"
            ) from error
    return list(description.devices)


def program_for(config: Any, data: DataFacts, devices: Sequence[Any]) -> Program:
    """The program of a config over these devices, by the way that training takes."""
    validate(config)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, devices)
    check_batch(config, mesh)
    sample = abstract_batch(data.spec, config.data.batch_size)["image"]
    # A batch larger than the set is planned all the same: the search for the largest one passes through it.
    num_train = max(data.num_train, config.data.batch_size)
    return build_program(config, num_train=num_train, num_classes=data.num_classes, sample=sample, mesh=mesh)


def trace_step(program: Program, batch: Any) -> Any:
    """The step as a jaxpr that can be lowered; nothing is computed."""
    step: Any = program.train_step
    return step.trace(program.factory.abstract, batch)


class StepCompiler:
    """Facts of requests, compiled at most once: they are kept on disk by program and target.

    Args:
        folder: of the kept facts; None keeps nothing.
        on_compile: told what is about to be compiled.
    """

    def __init__(
        self, data: DataFacts, folder: pathlib.Path | None, on_compile: Callable[[str], None] = lambda what: None
    ):
        self.data, self.folder, self.on_compile = data, folder, on_compile
        self.compilations = 0
        self._devices: dict[tuple[Gpu, str], list[Any]] = {}

    def facts(self, request: Request) -> Facts:
        return self.all_facts([request])[0]

    def all_facts(self, requests: Sequence[Request]) -> list[Facts]:
        """In the order of the requests; compilations overlap."""
        workers = max(1, min(MOST_PARALLEL, os.cpu_count() or 1))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            # Tracing is Python and stays in this thread; compiling is not, and leaves it.
            pending = [self._start(request, pool) for request in requests]
            return [future if isinstance(future, Facts) else future.result() for future in pending]

    def _start(self, request: Request, pool: concurrent.futures.Executor) -> "Facts | concurrent.futures.Future[Facts]":
        config_text = json.dumps(flatten(request.config), sort_keys=True, default=list)
        asked = self._digest(config_text, str(self.data), sources_digest(), *tracing_circumstances(), request)
        kept = self._read(asked)
        if kept is not None:
            return kept
        config = request.config
        devices = self._topology(request)
        program = program_for(config, self.data, devices)
        batch = abstract_batch(self.data.spec, config.data.batch_size)
        traced = trace_step(program, batch)
        lowered = traced.lower()
        built = self._digest(lowered.as_text(), readers_digest(), request)
        kept = self._read(built)
        if kept is not None:
            self._write(asked, kept)
            return kept
        self.compilations += 1
        self.on_compile(describe_request(request))
        flops = jaxpr_flops(traced.jaxpr.jaxpr, Rules(platform="cuda"))

        def compile_and_keep() -> Facts:
            facts = compile_step(lowered, config, program, batch, flops)
            self._write(built, facts)
            self._write(asked, facts)
            return facts

        return pool.submit(compile_and_keep)

    def _topology(self, request: Request) -> list[Any]:
        key = request.gpu, request.topology
        if key not in self._devices:
            self._devices[key] = topology_devices(*key)
        return self._devices[key]

    def _digest(self, *parts: Any) -> str:
        *program, request = parts
        versions = [f"{wheel} {metadata.version(wheel)}" for wheel in ("jax", "jaxlib", *WHEELS) if _installed(wheel)]
        target = [target_config(request.gpu), request.topology, os.environ.get("XLA_FLAGS", "")]
        text = "\0".join([str(FORMAT), str(COMPILER_OPTIONS), *program, *target, *versions])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _read(self, digest: str) -> Facts | None:
        if self.folder is None:
            return None
        try:
            return Facts(**json.loads((self.folder / f"{digest}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None  # not there, or not whole: compile

    def _write(self, digest: str, facts: Facts) -> None:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / f"{digest}.json", dataclasses.asdict(facts))
        except (OSError, UserError):
            self.folder = None  # a read-only home costs compilations, not the plan


def compile_step(lowered: Any, config: Any, program: Program, batch: Any, flops: int) -> Facts:
    """Compiles for the devices of the program's mesh and reads off memory, traffic and types."""
    started = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options={**COMPILER_OPTIONS, **ptxas_option()})
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"XLA could not compile this step for the GPU ({str(error).splitlines()[0][:200]})") from error
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    module = parse_hlo(compiled.as_text())
    products = module.products()
    state = program.factory.abstract
    return Facts(
        batch_size=config.data.batch_size,
        accum_steps=config.train.accum_steps,
        precision=config.train.precision,
        remat=config.train.remat,
        devices=program.mesh.size,
        fsdp=program.mesh.shape["fsdp"],
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        state_bytes=device_bytes(state),
        parameter_bytes=device_bytes(state.params),
        optimizer_bytes=device_bytes(state.opt_state),
        target_bytes=device_bytes(getattr(state, "target", {})),
        batch_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch)) // program.mesh.size,
        flops=flops,
        bytes_moved=module.bytes_moved(),
        collectives={c.kind: [c.count, c.wire_bytes] for c in module.collectives()},
        largest_convolution_bytes=module.largest_convolution_bytes(),
        convolutions=sum(p.kind == "convolution" for p in products),
        encoder_float32_products=[p.scope for p in products if "encoder" in p.scope and "f32" in p.types],
        host_calls=module.host_calls(),
        compile_seconds=seconds,
    )


def ptxas_option() -> dict[str, str]:
    """The wheel's ptxas, whatever toolkit this machine or CUDA_ROOT has."""
    return {"xla_gpu_cuda_data_dir": str(require_wheels())}


def device_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays on one device, as its shardings lay them out."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def describe_request(request: Request) -> str:
    config = request.config
    parts = [f"batch {config.data.batch_size:,}", config.train.precision]
    parts += [f"{config.train.accum_steps} accumulation steps"] if config.train.accum_steps > 1 else []
    parts += ["remat"] if config.train.remat != "none" else []
    parts += [f"fsdp {config.mesh.fsdp}"] if config.mesh.fsdp > 1 else []
    count = f"{request.devices} x " if request.devices > 1 else ""
    return f"{count}{request.gpu.key}: {', '.join(parts)}"


def default_folder() -> pathlib.Path:
    """Where plans are kept between runs."""
    return cache_folder() / "plans"


def tracing_circumstances() -> list[str]:
    """What, beside config and code of this package, decides which program is traced."""
    versions = [f"{package} {metadata.version(package)}" for package in ("flax", "optax")]
    settings: Any = jax.config
    return [*versions, str(settings.jax_default_matmul_precision), str(settings.jax_enable_x64)]


@functools.lru_cache(maxsize=1)
def sources_digest() -> str:
    """Changes whenever the code of this package does."""
    return _files_digest(sorted(pathlib.Path(__file__).parents[1].rglob("*.py")))


@functools.lru_cache(maxsize=1)
def readers_digest() -> str:
    """Changes whenever the code does that reads facts off a program."""
    return _files_digest([pathlib.Path(__file__).parents[1] / name for name in READERS])


def _files_digest(paths: Sequence[pathlib.Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
