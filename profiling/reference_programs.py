"""Encoders as published measurements run them, compiled for GPUs that are not there.

`infer` is a forward pass with a classifier; `train` is a supervised step with SGD and momentum. Both compute in
bfloat16 with float32 parameters, as automatic mixed precision does. What a compilation shows is kept in the cache
folder by program and target.
"""

import dataclasses
import hashlib
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import SingleDeviceSharding
from optimized_programs import compile_apart, read_notes

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json_or_empty, write_json
from jepa_jax.compiled.kernels import Kernel, read_kernels
from jepa_jax.models import resnet, vit
from jepa_jax.planning.absent_gpus import absent_devices, target_config
from jepa_jax.planning.step_compiler import code_digest
from jepa_jax.runtime.hardware import Gpu, lowering_for
from jepa_jax.runtime.start import cache_folder

CLASSES = 1000
VITS = {f"{name}_patch16_224": name for name in vit.SIZES}  # timm's names


class Case(NamedTuple):
    """A program to compile: an encoder, its image size, a batch, and "train" or "infer"."""

    model: str
    image_size: int
    batch_size: int
    mode: str


@dataclasses.dataclass(frozen=True)
class CaseFacts:
    """What the compilation of a case shows."""

    peak_bytes: int
    largest_convolution_bytes: int
    kernels: list[Kernel]


def case_facts(case: Case, gpu: Gpu, on_compile: Callable[[str], None] = lambda what: None) -> CaseFacts:
    """Returns the facts of a case on a GPU, optimizing its program if they are not kept."""
    code = code_digest("models/**/*.py", "compiled/*.py") + pathlib.Path(__file__).read_text()
    path = _kept_at(repr(case), code, target_config(gpu), jax.__version__)
    if not (kept := read_json_or_empty(path)):
        what = f"{case.model} at {case.image_size}, batch {case.batch_size}, {case.mode}, for {gpu.name}"
        on_compile(f"compiling {what}")
        kept = _facts_of(case, gpu)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, kept)
    return CaseFacts(**{**kept, "kernels": [Kernel(*one) for one in kept["kernels"]]})


def _facts_of(case: Case, gpu: Gpu) -> dict[str, Any]:
    def lower() -> Any:
        program, arguments = step_of(case, SingleDeviceSharding(absent_devices(gpu, "1x1x1")[0]))
        with lowering_for(gpu):
            return program.trace(*arguments).lower()

    with tempfile.TemporaryDirectory() as folder:
        if error := compile_apart(lower, pathlib.Path(folder)):
            raise UserError(f"{case} for {gpu.name}: {error}")
        hlo, peak = read_notes(pathlib.Path(folder))
    convolution = hlo.largest_convolution_bytes()
    return {"peak_bytes": peak, "largest_convolution_bytes": convolution, "kernels": read_kernels(hlo)}


def _kept_at(*parts: str) -> pathlib.Path:
    """Returns the file of facts that these texts decide about."""
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return cache_folder() / "predictions" / f"{digest}.json"


def build_model(case: Case) -> nnx.List:
    """Returns the encoder and classifier of a case."""
    rngs, dtype = nnx.Rngs(0), jnp.bfloat16
    encoder: Any
    if case.model in resnet.SIZES:
        blocks, bottleneck = resnet.SIZES[case.model]
        encoder = resnet.ResNet(blocks, bottleneck=bottleneck, stem="imagenet", dtype=dtype, rngs=rngs)
    elif case.model in VITS:
        sizes = vit.SIZES[VITS[case.model]]
        encoder = vit.ViT(*sizes, image_size=case.image_size, patch_size=16, dtype=dtype, rngs=rngs)
    else:
        raise UserError(f"model {case.model}: not one of {', '.join([*resnet.SIZES, *VITS])}; remove its rows")
    return nnx.List([encoder, nnx.Linear(encoder.feature_dim, CLASSES, dtype=dtype, rngs=rngs)])


def step_of(case: Case, sharding: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the jitted program of a case and the shapes of its arguments."""

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    graph, parameters, rest = nnx.split(nnx.eval_shape(lambda: build_model(case)), nnx.Param, ...)
    size = case.image_size
    images = shapes(jax.ShapeDtypeStruct((case.batch_size, size, size, 3), jnp.float32))
    if case.mode == "infer":

        def forward(parameters: Any, rest: Any, images: jax.Array) -> jax.Array:
            encoder, head = nnx.merge(graph, parameters, rest)
            return head(encoder(images.astype(jnp.bfloat16)))

        return jax.jit(forward), (shapes(parameters), shapes(rest), images)

    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(parameters: Any, rest: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, ...]:
        def loss(parameters: Any) -> tuple[jax.Array, Any]:
            model = nnx.merge(graph, parameters, rest, copy=True)
            encoder, head = model
            logits = head(encoder(images.astype(jnp.bfloat16), train=True)).astype(jnp.float32)
            value = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            return value, nnx.state(model, nnx.Not(nnx.Param))

        (value, rest_now), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), rest_now, state, value

    labels = shapes(jax.ShapeDtypeStruct((case.batch_size,), jnp.int32))
    state = shapes(jax.eval_shape(optimizer.init, parameters))
    return jax.jit(step, donate_argnums=(0, 1, 2)), (shapes(parameters), shapes(rest), state, images, labels)
