"""Compiling for GPUs that are not there: guards on the step of `rapid`, and facts about small programs.

Programs are really compiled (no test runs on a GPU). The facts are kept in .cache/test_plans by program and target, so
that only a changed program is compiled again.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

from jepa_jax.data.contract import abstract_batch, image_spec
from jepa_jax.data.facts import DataFacts, data_facts
from jepa_jax.device_check.program import overlapped
from jepa_jax.models.kernels.conv import conv2d
from jepa_jax.planning import step_compiler
from jepa_jax.planning.absent_gpus import absent_devices, compile_lowered
from jepa_jax.planning.estimate import FITS
from jepa_jax.planning.factors import predict
from jepa_jax.planning.planner import Planner
from jepa_jax.planning.step_compiler import Request, StepCompiler, program_for, trace_step
from jepa_jax.program.config import load_config
from jepa_jax.runtime.hardware import lowering_for
from profiling.fuzz_json import some_facts
from tests.planning.line_compiler import CIFAR, GIB, TABLE, LineCompiler
from tests.sequences import SequenceSource
from tests.tiny import tiny_config, tiny_masked_config

PLANS = pathlib.Path(__file__).parents[2] / ".cache" / "test_plans"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the wheels of the compiler are for Linux")


def all_facts(*requests):
    return StepCompiler(CIFAR, PLANS).all_facts(requests)


# --- the step of configs/rapid.py on an RTX 4090 ---


@pytest.fixture(scope="module")
def rapid_facts():
    """With every policy of remat: three compilations, about a minute of processor time when nothing is kept yet."""
    request = Request(load_config("rapid"), TABLE["rtx4090"])
    assert (request.config.data.batch_size, request.config.train.precision) == (3072, "bfloat16")
    others = [request.changed({"train.remat": policy}) for policy in ("light", "full")]
    return dict(zip(("none", "light", "full"), all_facts(request, *others), strict=True))


@on_linux
@pytest.mark.slow
def test_rapid_needs_little_memory(rapid_facts):
    assert rapid_facts["none"].peak_bytes <= 16.5 * GIB
    assert rapid_facts["full"].peak_bytes <= 6.5 * GIB


@on_linux
@pytest.mark.slow
def test_rapid_convolves_in_bfloat16(rapid_facts):
    """Twenty convolutions per view and pass (no input gradient for the first); all by cuDNN, none in float32."""
    assert rapid_facts["none"].convolutions == 2 * (20 + 20 + 19)
    assert rapid_facts["none"].encoder_float32_products == []
    assert rapid_facts["full"].encoder_float32_products == []


@on_linux
@pytest.mark.slow
def test_rapid_donates_its_state_and_never_calls_the_host(rapid_facts):
    for facts in rapid_facts.values():
        assert facts.alias_bytes == facts.state_bytes >= facts.parameter_bytes + facts.optimizer_bytes
        assert facts.host_calls == []


@on_linux
@pytest.mark.slow
def test_rapid_fits_an_rtx_4090(rapid_facts):
    estimate = Planner(StepCompiler(CIFAR, PLANS), TABLE).estimate(Request(load_config("rapid"), TABLE["rtx4090"]))
    assert estimate.verdict == FITS
    assert 5_000 < estimate.speed.images_per_sec < estimate.speed.bound_images_per_sec < 15_000
    # cuDNN multiplies padding too.
    assert sum(kernel.flops * kernel.runs for kernel in rapid_facts["none"].kernels) == pytest.approx(
        rapid_facts["none"].flops, rel=0.2
    )


@on_linux
@pytest.mark.slow
def test_light_remat_halves_the_activations_of_rapid_and_costs_little(rapid_facts):
    gpu = TABLE["rtx4090"]
    seconds = {name: predict(facts.kernels, gpu, samples=3072).seconds for name, facts in rapid_facts.items()}
    assert rapid_facts["light"].peak_bytes <= 10 * GIB
    assert seconds["light"] <= 1.03 * seconds["none"] < seconds["full"]
    assert rapid_facts["light"].flops < 1.02 * rapid_facts["none"].flops


@on_linux
@pytest.mark.slow
def test_remat_trades_operations_for_memory(rapid_facts):
    assert rapid_facts["full"].peak_bytes < 0.45 * rapid_facts["none"].peak_bytes
    assert rapid_facts["full"].flops > 1.2 * rapid_facts["none"].flops


def test_lowered_for_a_gpu_our_convolution_is_a_convolution():
    def gradient(x, kernel):
        return jax.grad(lambda k: conv2d(x, k, padding=1).astype(jnp.float32).sum())(kernel)

    args = jax.ShapeDtypeStruct((2, 8, 8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)
    traced = jax.jit(gradient).trace(*args)
    text = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")}
    assert "stablehlo.convolution" in text["cuda"] and "stablehlo.dot_general" not in text["cuda"]
    assert "stablehlo.convolution" not in text["cpu"]


# --- small programs ---


def small_request(changes, topology="1x1x1"):
    """A few layers, two views, no augmentation: seconds to compile."""
    operations = ("crop", "flip", "jitter", "grayscale", "blur", "solarize")
    plain = {f"data__augment__{operation}__probability": 0.0 for operation in operations}
    config = tiny_config(
        method__views=2, method__loss="vicreg", method__projector=(1024, 1024), optim__name="sgd", **plain,
        data__augment__crop__size=0, data__image_size=32, train__precision="bfloat16",
    )  # fmt: skip
    return Request(config, TABLE["a100-80"], topology).changed(changes)


@on_linux
@pytest.mark.slow
def test_a_small_step_is_compiled_and_its_float32_products_are_seen():
    """Without this, the absence of float32 products in `rapid` would mean nothing."""
    (facts,) = all_facts(small_request({"train.precision": "float32"}))
    assert facts.encoder_float32_products and facts.host_calls == []
    assert facts.alias_bytes == facts.state_bytes < facts.argument_bytes < facts.peak_bytes
    assert facts.batch_bytes == 16 * (32 * 32 * 3 + 4)


@pytest.fixture(scope="module")
def eight_gpus():
    request = small_request({"data.batch_size": 8192}, "1x1x8")
    replicated, fsdp = all_facts(request, request.changed({"mesh.fsdp": 8}))
    return {"replicated": replicated, "fsdp": fsdp}


@on_linux
@pytest.mark.slow
def test_fsdp_divides_the_arguments(eight_gpus):
    replicated, fsdp = eight_gpus["replicated"], eight_gpus["fsdp"]
    assert fsdp.argument_bytes < 0.5 * replicated.argument_bytes
    assert fsdp.alias_bytes == fsdp.state_bytes
    assert "all-gather" in fsdp.collectives
    # Operations do not depend on the layout, but for norms: they are products where leaves are joined.
    assert replicated.flops == pytest.approx(fsdp.flops, rel=1e-4)


@on_linux
@pytest.mark.slow
def test_every_device_sends_its_gradients_around_the_ring_once(eight_gpus):
    """In bfloat16 at least, in float32 at most; VICReg's covariances of both views go with them."""
    facts = eight_gpus["replicated"]
    sent = sum(wire for _, wire in facts.collectives.values())
    covariances = 2 * 4 * 1024**2
    assert 2 * 7 / 8 * facts.parameter_bytes / 2 < sent < 2 * 7 / 8 * 1.05 * (facts.parameter_bytes + covariances)


@on_linux
@pytest.mark.slow
def test_eight_gpus_gather_nothing_and_exchange_gradients_while_they_compute():
    config = tiny_masked_config("mae", model__width=64, model__depth=2, data__batch_size=64)
    gpu, data = TABLE["a100-80"], data_facts(config.data)
    with lowering_for(gpu):
        step = program_for(config, data, absent_devices(gpu, "1x1x8"))
        text = compile_lowered(trace_step(step, abstract_batch(data.spec, 64)).lower()).as_text()
    assert "all-gather" not in text
    apart, total = overlapped(text)
    assert total == apart > 0


@on_linux
def test_plans_are_kept_by_program_and_target(tmp_path, monkeypatch):
    request = small_request({"data.batch_size": 512})
    facts = LineCompiler().all_facts([request])
    fresh = StepCompiler(CIFAR, tmp_path)
    monkeypatch.setattr(step_compiler, "compile_step", lambda *args: facts[0])
    assert fresh.all_facts([request]) == facts
    assert fresh.compilations == 1
    fresh.all_facts([request, request.changed({"log.every_steps": 7})])  # another config, the same program
    assert fresh.compilations == 1
    assert StepCompiler(CIFAR, tmp_path).all_facts([request]) == facts
    fresh.all_facts([request.changed({"gpu": TABLE["rtx4090"]}), request.changed({"data.batch_size": 256})])
    assert fresh.compilations == 3


@on_linux
def test_data_of_any_kind_and_methods_of_the_user_are_planned(tmp_path, monkeypatch):
    seen = []
    facts = LineCompiler().all_facts([small_request({})])[0]

    def compile_step(program, batch, traced, lowered):
        seen.append({name: (leaf.shape, str(leaf.dtype)) for name, leaf in batch.items()})
        return facts

    monkeypatch.setattr(step_compiler, "compile_step", compile_step)
    grey = tiny_config(data__channels=1, data__augment__mean=(0.5,), data__augment__std=(0.2,),
                       data__augment__grayscale__probability=0.0, data__augment__jitter__probability=0.0)  # fmt: skip
    unlabelled = StepCompiler(DataFacts(96, 0, image_spec(16, 1, labelled=False)), tmp_path)
    unlabelled.all_facts([Request(grey, TABLE["h100"])])
    own = load_config("quickstart", {"method.name": "tests.sequence_methods:LineMethod", "data.batch_size": 16})
    sequences = StepCompiler(DataFacts(50, 0, SequenceSource.spec), tmp_path)
    sequences.all_facts([Request(own, TABLE["h100"])])
    assert seen == [
        {"image": ((16, 16, 16, 1), "uint8")},
        {"frames": ((16, 4, 3, 5), "float32"), "length": ((16,), "int32")},
    ]
    # Of a method outside the package only the lowered program tells whether it has changed.
    assert len(list(tmp_path.glob("*.json"))) == 2 + 1


def test_facts_of_the_cache_that_were_altered_are_not_used(tmp_path):
    file, facts = tmp_path / "facts.json", some_facts()
    step_compiler.write_facts(file, facts)
    text = file.read_text()
    assert step_compiler.read_facts(file) == facts
    for altered in (text.replace('"peak_bytes": 5', '"peak_bytes": 4'), text.replace('"f32"', "null"), text[:-9], "[]"):
        assert altered != text
        file.write_text(altered)
        assert step_compiler.read_facts(file) is None
