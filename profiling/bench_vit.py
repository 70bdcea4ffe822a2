"""Times steps of transformer configs beside the same steps of plain JAX, and their parts beside single products.

  python profiling/bench_vit.py [--configs=hjepa_quick_val:32,ijepa_cifar10,mae_cifar10] [--rounds=5]

The plain programs run the same method with flax's own modules: `nnx.Linear`, `nnx.LayerNorm`,
`jax.nn.dot_product_attention`, `jax.nn.gelu`, `lax.conv` (of whitened patches), and the C library's default handling of
freed memory. Each program has a process of its own, and they take turns; ratios are those of the medians. Parts, in the
sizes of ViT-Tiny (32 images of 197 tokens): attention and MLP, forward and backward, beside the matrix product of the
MLP. With torch and timm installed, a timm ViT-Tiny takes turns with ours, as PyTorch runs it by default.

Last line: JSON with `ratio_wall` and `ratio_cpu` (by config), `attention_gflops`, `mlp_gflops`, `matmul_gflops`, and
all rounds.
"""

import contextlib
import importlib.util
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from bench_step import StepProgram, plain_convolution

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

BATCH, LENGTH, WIDTH, HEADS, DEPTH, PIXELS = 32, 197, 192, 3, 12, 224
PART_REPEATS = 20


def add_flags(parser: Parser) -> None:
    parser.add_flag(
        "configs", "LIST", "configs, each with its batch if it is not the config's own",
        "hjepa_quick_val:32,ijepa_cifar10,mae_cifar10",
    )  # fmt: skip
    parser.add_flag("rounds", "N", "timed rounds, each of which runs both programs", 5, least=1)
    parser.add_flag("steps", "N", "steps per round; 0 = as many as take a second", 0, least=0)


@contextlib.contextmanager
def plain_transformers() -> Iterator[None]:
    """Traces models with flax's and JAX's own parts within a `with` block."""
    from unittest import mock

    import jax
    from flax import nnx

    from jepa_jax.models import vit
    from jepa_jax.models.kernels import linear

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v)

    def mlp(x: Any, up: Any, down: Any) -> Any:
        return down(jax.nn.gelu(up(x), approximate=False))

    parts: dict[str, Any] = {
        "attention": attention,
        "mlp": mlp,
        "LayerNorm": nnx.LayerNorm,
        "with_gradient_made_once": lambda x: x,
    }
    with mock.patch.multiple(vit, **parts), mock.patch.object(linear, "Linear", nnx.Linear), plain_convolution():
        yield


def serve_step(turns: Connection, who: str, config: str, changes: dict[str, Any]) -> None:
    """Answers with times of a config's training step."""
    from jepa_jax.program.config import load_config

    start(ours=who == "ours")
    with plain_transformers() if who == "plain" else contextlib.nullcontext():
        program = StepProgram.of(load_config(config, changes))
    answer(turns, program.timed_round, ours=who == "ours")


def serve_vit(turns: Connection) -> None:
    """Answers with times of our ViT-Tiny, forward and backward."""
    start(ours=True)
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jepa_jax.models.vit import ViT

    graph, state = nnx.split(ViT(WIDTH, DEPTH, HEADS, image_size=PIXELS, patch_size=16, rngs=nnx.Rngs(0)))
    pixels = jax.random.normal(jax.random.key(0), (BATCH, PIXELS, PIXELS, 3))
    step = jax.jit(jax.grad(lambda state, pixels: jnp.sum(jnp.square(nnx.merge(graph, state)(pixels)))))
    jax.block_until_ready(step(state, pixels))
    answer(turns, timed(lambda: jax.block_until_ready(step(state, pixels))), ours=True)


def serve_timm(turns: Connection) -> None:
    """Answers with times of timm's ViT-Tiny, forward and backward."""
    import timm
    import torch

    model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    images = torch.randn(BATCH, 3, PIXELS, PIXELS)

    def step() -> None:
        model.zero_grad()
        model(images).square().sum().backward()

    answer(turns, timed(step), ours=False)


def start(*, ours: bool) -> None:
    """Prepares a process: ours as training does, the other as it is."""
    from jepa_jax.runtime.allocator import keep_freed_memory
    from jepa_jax.runtime.platforms import import_jax
    from jepa_jax.runtime.start import start_compile_cache

    import_jax()
    start_compile_cache()
    if ours:
        keep_freed_memory()


def timed(step: Callable[[], Any]) -> Callable[[int], tuple[float, float]]:
    """Returns a function that takes steps and returns wall and CPU seconds per step."""

    def round_of(steps: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps

    return round_of


def answer(turns: Connection, round_of: Callable[[int], tuple[float, float]], *, ours: bool) -> None:
    """Says that this process is ready, then takes as many steps as asked for until that is 0."""
    from jepa_jax.runtime.allocator import set_gaps_aside

    if ours:
        set_gaps_aside()
    turns.send("ready")
    while steps := turns.recv():
        turns.send(round_of(steps))


def take_turns(
    programs: dict[str, tuple[Callable[..., None], tuple]], rounds: int, steps: int, console: Console
) -> dict[str, list[tuple[float, float]]]:
    """Returns wall and CPU seconds per step of each round; each program has a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    turns: dict[str, Connection] = {}
    processes = []
    for name, (target, arguments) in programs.items():
        turns[name], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=target, args=(theirs, *arguments), daemon=True))
        processes[-1].start()
        theirs.close()
        told(turns[name].recv, name)

    def take(name: str, steps: int) -> tuple[float, float]:
        told(lambda: turns[name].send(steps), name)
        return told(turns[name].recv, name)

    for name in turns:
        seconds, _ = take(name, 4)  # until the heap has its size
        steps = steps or max(1, round(1 / seconds))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for i in range(rounds):
        for name in list(turns)[:: 1 if i % 2 == 0 else -1]:
            times[name].append(take(name, steps))
            console.line(
                f"round {i + 1}: {name:<6} {times[name][-1][0]:7.3f} s per step, {times[name][-1][1]:7.3f} CPU s"
            )
    for connection, process in zip(turns.values(), processes, strict=True):
        connection.send(0)
        process.join()
    return times


def told(exchange: Callable[[], Any], name: str) -> Any:
    """Returns what an exchange with a process returns."""
    try:
        return exchange()
    except (EOFError, OSError):
        raise UserError(f"the process of {name} has ended: its error is above, or memory ran out") from None


def medians(times: dict[str, list[tuple[float, float]]]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns wall and CPU seconds by program."""
    wall, cpu = ({name: statistics.median(t[i] for t in times[name]) for name in times} for i in (0, 1))
    return wall, cpu


def bench_config(name: str, rounds: int, steps: int, console: Console) -> dict[str, Any]:
    """Returns ratios of the plain step to ours."""
    from jepa_jax.program.config import load_config

    config_name, _, batch = name.partition(":")
    changes: dict[str, Any] = {"data.source": "shapes", "data.dir": "", "data.num_workers": 0}
    changes |= {"data.batch_size": batch} if batch else {}
    config = load_config(config_name, changes)  # refuses, before processes are started, what cannot be
    console.line(f"{config_name}: compiling")
    programs = {who: (serve_step, (who, config_name, changes)) for who in ("ours", "plain")}
    times = take_turns(programs, rounds, steps, console)
    wall, cpu = medians(times)
    return {
        "config": config_name, "batch_size": config.data.batch_size, "seconds": wall["ours"],
        "ratio_wall": wall["plain"] / wall["ours"], "ratio_cpu": cpu["plain"] / cpu["ours"], "rounds": times,
    }  # fmt: skip


def gflops(operations: float, function: Callable[..., Any], *arguments: Any) -> float:
    """Returns the rate of the median call."""
    import jax

    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arguments))
    seconds = []
    for _ in range(PART_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
    return operations / statistics.median(seconds) / 1e9


def bench_parts() -> dict[str, float]:
    """Returns GFLOP/s of attention and MLP, forward and backward, and of a product of the MLP's size."""
    import jax
    import jax.numpy as jnp

    from jepa_jax.models.kernels.attention import attention
    from jepa_jax.models.kernels.mlp import mlp

    keys = iter(jax.random.split(jax.random.key(0), 9))
    x = jax.random.normal(next(keys), (BATCH, LENGTH, WIDTH))
    heads = [jax.random.normal(next(keys), (BATCH, LENGTH, HEADS, WIDTH // HEADS)) for _ in range(4)]
    up, down = (jax.random.normal(next(keys), shape) / 20 for shape in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)))

    def attend(q: Any, k: Any, v: Any, dy: Any) -> Any:
        out, backward = jax.vjp(attention, q, k, v)
        return out, backward(dy)

    def perceive(x: Any, up: Any, down: Any) -> Any:
        out, backward = jax.vjp(lambda x, up, down: mlp(x, lambda t: t @ up, lambda t: t @ down), x, up, down)
        return out, backward(x)

    product = 2 * BATCH * LENGTH * WIDTH * 4 * WIDTH
    scores = 2 * BATCH * LENGTH * LENGTH * WIDTH
    return {
        "attention_gflops": gflops(6 * scores, attend, *heads),
        "mlp_gflops": gflops(6 * product, perceive, x, up, down),
        "matmul_gflops": gflops(product, jnp.matmul, x.reshape(-1, WIDTH), up),
    }


def bench_timm(rounds: int, steps: int, console: Console) -> dict[str, Any] | None:
    """Returns seconds of a timm ViT-Tiny, forward and backward, and of ours; None unless torch and timm are there."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "timm")):
        return None
    times = take_turns({"timm": (serve_timm, ()), "ours": (serve_vit, ())}, rounds, steps, console)
    wall, cpu = medians(times)
    return {"seconds": wall, "cpu_seconds": cpu, "rounds": times}


def bench(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.program.config import load_config
    from jepa_jax.runtime.provenance import environment
    from jepa_jax.runtime.start import setup

    setup(load_config("quickstart"))
    parts = bench_parts()
    console.line(", ".join(f"{name} {value:.0f}" for name, value in parts.items()))
    beside_timm = bench_timm(arguments.rounds, arguments.steps, console)
    rows = [
        bench_config(name, arguments.rounds, arguments.steps, console)
        for name in filter(None, arguments.configs.split(","))
    ]
    lines = [
        f"{row['config']:<18} {row['seconds']:.3f} s, {row['ratio_wall']:.2f}x wall, {row['ratio_cpu']:.2f}x CPU"
        for row in rows
    ]
    result = {
        "ratio_wall": {row["config"]: row["ratio_wall"] for row in rows},
        "ratio_cpu": {row["config"]: row["ratio_cpu"] for row in rows},
        **parts,
        "timm": beside_timm,
        "configs": rows,
        "cores": environment()["cores"],
    }
    if beside_timm is not None:
        seconds = beside_timm["seconds"]
        lines.append(f"ViT-Tiny: ours {seconds['ours']:.3f} s, timm {seconds['timm']:.3f} s")
    return Result([result], "\n".join([*lines, str(parts)]))


if __name__ == "__main__":
    command = Command("profiling/bench_vit.py", __doc__, add_flags, bench, program="python")
    sys.exit(command.main())
