"""Compiling for GPUs that are not there: guards on the step of `rapid`, and facts about small programs.

Programs are really compiled (no test runs on a GPU); what the compiler says is kept in .cache/test_plans by program and
target, so that only a changed program is compiled again.
"""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest

from configs import rapid
from jepa_jax.base.errors import UserError
from jepa_jax.models.conv import conv2d
from jepa_jax.planning import gpu_compile
from jepa_jax.planning.gpu_compile import Request, StepCompiler
from jepa_jax.planning.planner import FITS, Planner
from tests.planning.test_planner import CIFAR, TABLE, LineCompiler
from tests.tiny import tiny_config

GIB = 2**30
PLANS = pathlib.Path(__file__).parents[2] / ".cache" / "test_plans"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the wheels of the compiler are for Linux")


def compiler(data=CIFAR):
    return StepCompiler(data, PLANS)


# --- the step of configs/rapid.py on an RTX 4090 ---


@pytest.fixture(scope="module")
def rapid_facts():
    """With and without remat: two compilations, about a minute of processor time when nothing is kept yet."""
    request = Request(rapid.get_config(), TABLE["rtx4090"])
    plain, remat = compiler().all_facts([request, request.changed(train__remat="full")])
    return {"none": plain, "full": remat}


@on_linux
def test_rapid_needs_little_memory(rapid_facts):
    assert rapid_facts["none"].batch_size == 3072 and rapid_facts["none"].precision == "bfloat16"
    assert rapid_facts["none"].peak_bytes <= 16.5 * GIB
    assert rapid_facts["full"].peak_bytes <= 6.5 * GIB


@on_linux
def test_rapid_convolves_in_bfloat16(rapid_facts):
    """Twenty convolutions a view and pass (no input gradient for the first); all by cuDNN, none in float32."""
    assert rapid_facts["none"].convolutions == 2 * (20 + 20 + 19)
    assert rapid_facts["none"].encoder_float32_products == []
    assert rapid_facts["full"].encoder_float32_products == []


@on_linux
def test_rapid_donates_its_state_and_never_calls_the_host(rapid_facts):
    for facts in rapid_facts.values():
        assert facts.alias_bytes == facts.state_bytes >= facts.parameter_bytes + facts.optimizer_bytes
        assert facts.host_calls == []


@on_linux
def test_rapid_fits_an_rtx_4090(rapid_facts):
    row = Planner(compiler(), TABLE).row(Request(rapid.get_config(), TABLE["rtx4090"]))
    assert row.verdict == FITS
    assert 5_000 < row.speed.images_per_sec < 50_000
    assert row.speed.compute_seconds == pytest.approx(rapid_facts["none"].flops / 165e12)


@on_linux
def test_the_assembler_is_the_wheels_own(monkeypatch):
    monkeypatch.setenv("CUDA_ROOT", "/usr/local/cuda")
    folder = pathlib.Path(gpu_compile.ptxas_option()["xla_gpu_cuda_data_dir"])
    assert folder.parts[-2:] == ("nvidia", "cuda_nvcc") and (folder / "bin" / "ptxas").is_file()
    assert (folder / "nvvm").is_dir()


def test_lowered_for_a_gpu_our_convolution_is_a_convolution():
    def gradient(x, kernel):
        return jax.grad(lambda k: conv2d(x, k, padding=1).astype(jnp.float32).sum())(kernel)

    args = jax.ShapeDtypeStruct((2, 8, 8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)
    traced = jax.jit(gradient).trace(*args)
    text = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")}
    assert "stablehlo.convolution" in text["cuda"] and "stablehlo.dot_general" not in text["cuda"]
    assert "stablehlo.convolution" not in text["cpu"]


# --- small programs ---


def small_config(**changes):
    """A few layers, two views, no augmentation: seconds to compile."""
    config = tiny_config(method__views=2, method__loss="vicreg", method__projector=(1024, 1024), optim__name="sgd")
    for operation in ("crop", "flip", "jitter", "grayscale", "blur", "solarize"):
        config.data.augment[operation].probability = 0.0
    config.data.augment.crop.size, config.data.image_size = 0, 32
    config.train.precision = "bfloat16"
    return Request(config, TABLE["a100-80"]).changed(**changes).config


@on_linux
def test_products_of_a_float32_encoder_are_seen():
    """Else no float32 product inside an encoder, above, would mean nothing."""
    facts = compiler().facts(Request(small_config(train__precision="float32"), TABLE["a100-80"]))
    assert facts.encoder_float32_products


@pytest.fixture(scope="module")
def small_facts():
    request = Request(small_config(data__batch_size=8192), TABLE["a100-80"], "1x1x8")
    eight, fsdp = compiler().all_facts([request, request.changed(mesh__fsdp=8)])
    return {"eight": eight, "fsdp": fsdp}


@on_linux
def test_remat_trades_operations_for_memory(rapid_facts):
    assert rapid_facts["full"].peak_bytes < 0.45 * rapid_facts["none"].peak_bytes
    assert rapid_facts["full"].flops > 1.2 * rapid_facts["none"].flops


@on_linux
def test_fsdp_divides_the_arguments(small_facts):
    eight, fsdp = small_facts["eight"], small_facts["fsdp"]
    assert fsdp.argument_bytes < 0.5 * eight.argument_bytes
    assert fsdp.alias_bytes == fsdp.state_bytes
    assert "all-gather" in fsdp.collectives


@on_linux
def test_every_device_sends_its_gradients_around_the_ring_once(small_facts):
    """In bfloat16 at least, in float32 at most; VICReg's covariances of both views go with them."""
    facts = small_facts["eight"]
    sent = sum(wire for _, wire in facts.collectives.values())
    covariances = 2 * 4 * 1024**2
    assert 2 * 7 / 8 * facts.parameter_bytes / 2 < sent < 2 * 7 / 8 * 1.05 * (facts.parameter_bytes + covariances)


@on_linux
def test_operations_do_not_depend_on_how_a_batch_is_laid_out(small_facts):
    assert small_facts["eight"].flops == small_facts["fsdp"].flops


@on_linux
def test_plans_are_kept_by_program_and_target(tmp_path, monkeypatch):
    request = Request(small_config(data__batch_size=512), TABLE["a100-80"])
    facts = LineCompiler().all_facts([request])[0]
    fresh = StepCompiler(CIFAR, tmp_path)
    monkeypatch.setattr(gpu_compile, "compile_step", lambda *args: facts)
    fresh.facts(request)
    assert fresh.compilations == 1
    fresh.facts(request)
    fresh.facts(request.changed(log__every_steps=7))  # another config, the same program
    assert fresh.compilations == 1
    fresh.facts(request.changed(gpu=TABLE["rtx4090"]))
    fresh.facts(request.changed(data__batch_size=256))
    assert fresh.compilations == 3


def test_a_missing_wheel_gives_the_line_that_installs_it(monkeypatch):
    def version(name):
        if name == "nvidia-cuda-nvcc-cu12":
            raise gpu_compile.metadata.PackageNotFoundError(name)
        return "0.10.2"

    monkeypatch.setattr(gpu_compile.metadata, "version", version)
    line = "pip install jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12==12.9.86"
    with pytest.raises(UserError, match=re.escape(line)):
        gpu_compile.require_wheels()
