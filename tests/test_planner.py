"""Plans: guards on the compiled step of `rapid`, facts about small programs compiled for GPUs, and the arithmetic.

Programs are really compiled for GPUs that are not there (no test runs on one); what the compiler says is kept in
.cache/test_plans by program and target, so that only a changed program is compiled again.
"""

import dataclasses
import io
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest

from configs import rapid
from jepa_jax.errors import UserError
from jepa_jax.models.conv import conv2d
from jepa_jax.profiling import gpu_compile, memory_check, plan_command
from jepa_jax.profiling.gpu_compile import DataSize, Facts, Request, StepCompiler
from jepa_jax.profiling.hardware import load_table
from jepa_jax.profiling.hlo import Module, group_size, parse_hlo
from jepa_jax.profiling.plan_inputs import planned_data, sequence_note
from jepa_jax.profiling.plan_report import Circumstances, plan_json, plan_lines, plans_page
from jepa_jax.profiling.planner import FITS, FITS_BELOW, NO, TIGHT, Planner, memory_need
from jepa_jax.writers import Console
from tests.tiny import tiny_config

GIB = 2**30
TABLE = load_table()
PLANS = pathlib.Path(__file__).parents[1] / ".cache" / "test_plans"
CIFAR = DataSize(50_000, 10)
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


# --- arithmetic, with a compiler whose memory is known ---


class LineCompiler:
    """State, gradients and so many bytes an image: fewer with remat, twice as many in float32."""

    def __init__(self, per_image=4 * 2**20, state=GIB // 2, data=CIFAR):
        self.per_image, self.state, self.data, self.asked = per_image, state, data, []

    def all_facts(self, requests):
        self.asked += requests
        return [self._facts(request) for request in requests]

    def _facts(self, request):
        config, devices = request.config, request.devices
        batch = config.data.batch_size
        images = batch / devices / config.train.accum_steps
        each = self.per_image * (0.3 if config.train.remat == "full" else 1)
        each *= 2 if config.train.precision == "float32" else 1
        state = self.state // config.mesh.fsdp
        peak = round(1.5 * state + each * images)
        return Facts(
            batch_size=batch, accum_steps=config.train.accum_steps, precision=config.train.precision,
            remat=config.train.remat, devices=devices, fsdp=config.mesh.fsdp, argument_bytes=state + 3072 * batch,
            output_bytes=state, alias_bytes=state, temp_bytes=peak - state, peak_bytes=peak, state_bytes=state,
            parameter_bytes=state // 2, optimizer_bytes=state // 2, target_bytes=0, batch_bytes=3072 * batch // devices,
            flops=10**10 * batch, bytes_moved=round(5 * each * images), collectives={},
            largest_convolution_bytes=0, convolutions=1, matmuls=1, encoder_float32_products=[], host_calls=[],
            compile_seconds=1.0,
        )  # fmt: skip


def line_plan(batch=1024, gpu="rtx4090", per_image=4 * 2**20, state=GIB // 2, topology="1x1x1", **options):
    config = rapid.get_config()
    config.data.batch_size = batch
    line = LineCompiler(per_image, state)
    return Planner(line, TABLE).plans([Request(config, TABLE[gpu], topology)], **options)[0], line


def test_the_largest_batch_is_found_with_few_compilations():
    plan, line = line_plan(variants=False)
    largest = plan.largest[0][1]
    assert largest.row.verdict == FITS
    assert FITS_BELOW - largest.row.need.total / largest.row.capacity < 0.03
    assert len(line.asked) <= 3
    assert largest.batch_size % 8 == 0


def test_the_largest_batch_is_also_found_from_one_that_does_not_fit():
    plan, line = line_plan(batch=32768, variants=False)
    assert plan.row.verdict == NO
    assert 4000 < plan.largest[0][1].batch_size < 6000
    assert plan.largest[0][1].row.verdict == FITS


def test_the_largest_batch_ends_at_the_data():
    plan, _ = line_plan(per_image=1024, variants=False)
    assert plan.largest[0][1].at_set and plan.largest[0][1].batch_size == 50_000
    assert "50,000 (all data)" in "\n".join(plan_lines(plan, Circumstances(CIFAR), "rapid"))


def test_variants_have_the_sizes_that_memory_gives_them():
    plan, _ = line_plan()
    labels = {row.label: largest.batch_size for row, largest in plan.largest}
    assert list(labels) == ["as configured", "remat", "2 accumulation steps", "float32"]
    base = labels["as configured"]
    assert labels["remat"] > 2.5 * base
    assert labels["2 accumulation steps"] == pytest.approx(2 * base, rel=0.1)
    assert labels["float32"] == pytest.approx(base / 2, rel=0.1)


def test_several_gpus_get_a_plan_each():
    config = rapid.get_config()
    requests = [Request(config, TABLE[name]) for name in ("rtx4080", "h100")]
    small, large = Planner(LineCompiler(), TABLE).plans(requests, batch_sizes=(64, 128))
    assert (small.request.gpu.key, large.request.gpu.key) == ("rtx4080", "h100")
    assert small.row.capacity == TABLE["rtx4080"].memory_bytes
    assert small.largest[0][1].batch_size < large.largest[0][1].batch_size
    assert [row.facts.batch_size for row in large.batches] == [64, 128]
    assert [row.label for row, _ in large.largest] == ["as configured", "remat", "2 accumulation steps", "float32"]


def test_accumulation_is_left_out_where_devices_do_not_divide_a_part():
    plan, _ = line_plan(batch=24, topology="1x1x8")
    assert [row.label for row, _ in plan.largest] == ["as configured", "remat", "float32"]


def test_a_config_that_does_not_fit_gets_ways_out_that_do():
    plan, _ = line_plan(batch=8192)
    assert plan.row.verdict == NO
    assert len(plan.ways_out) >= 3 and all(way.verdict != NO for way in plan.ways_out)
    labels = [way.label for way in plan.ways_out]
    assert "remat" in labels and "2 accumulation steps" in labels
    assert plan.ways_out[-1].changes == {"gpu": "a100-40"}  # the smallest card that holds it comes last
    speeds = [way.speed.images_per_sec for way in plan.ways_out[:-1]]
    assert speeds == sorted(speeds, reverse=True)
    text = "\n".join(plan_lines(plan, Circumstances(CIFAR), "rapid"))
    assert "--config.train.remat=full" in text and "--config.train.accum_steps=2" in text


def test_changes_are_combined_when_one_is_not_enough():
    plan, _ = line_plan(batch=4096, per_image=80 * 2**20, gpu="rtx4080")
    assert any(set(way.changes) >= {"train.remat", "train.accum_steps"} or way.label.startswith("batch")
               for way in plan.ways_out)  # fmt: skip
    assert len(plan.ways_out) >= 2


def test_a_model_that_is_too_large_is_divided_by_fsdp():
    plan, _ = line_plan(batch=64, state=40 * GIB, topology="1x1x8", variants=False)
    assert plan.row.verdict == NO and plan.largest[0][1].batch_size == 0
    assert "FSDP over 8" in [way.label for way in plan.ways_out]


def test_the_margin_is_stated_part_by_part():
    facts = LineCompiler().all_facts([Request(rapid.get_config(), TABLE["rtx4090"])])[0]
    config = rapid.get_config()
    need = memory_need(dataclasses.replace(facts, largest_convolution_bytes=10 * GIB, devices=8), config, data_bytes=7)
    assert need.total == need.peak + 7 + need.context + need.workspace + need.collectives + need.fragmentation
    assert need.workspace == GIB and need.collectives > 0  # the workspace is capped
    assert memory_need(facts, config).collectives == 0
    config.data.pipeline = "grain"
    assert memory_need(facts, config).data == 2 * facts.batch_bytes  # batches that wait on the device


@pytest.mark.parametrize("share, verdict", [(0.9, FITS), (0.97, TIGHT), (1.05, NO)])
def test_verdicts(share, verdict):
    plan, _ = line_plan(variants=False)
    row = dataclasses.replace(plan.row, capacity=round(plan.row.need.total / share))
    assert row.verdict == verdict


def test_speed_is_the_slower_of_products_and_traffic():
    plan, _ = line_plan(variants=False)
    speed, gpu = plan.row.speed, TABLE["rtx4090"]
    assert speed.compute_seconds == pytest.approx(10**10 * 1024 / 165e12)
    assert speed.memory_seconds == pytest.approx(plan.row.facts.bytes_moved / (gpu.bandwidth_gb_per_second * 1e9))
    assert speed.images_per_sec == pytest.approx(1024 / max(speed.compute_seconds, speed.memory_seconds))


def test_the_cost_of_a_run_follows_from_its_length():
    plan, _ = line_plan(variants=False)
    result = plan_json(plan, Circumstances(CIFAR, price_per_hour=2.0))
    images = 50 * (50_000 // 1024) * 1024
    assert result["steps"] * 1024 == images
    fast, slow = result["run_seconds_predicted"]
    assert fast == pytest.approx(images / (0.7 * result["images_per_sec_bound"]))
    assert result["price_predicted"] == pytest.approx([2 * fast / 3600, 2 * slow / 3600])


def test_the_json_object_has_the_agreed_keys():
    plan, _ = line_plan(variants=False)
    agreed = (
        "gpu topology batch_size peak_bytes argument_bytes temp_bytes capacity_bytes verdict largest_batch "
        "flops_per_step bytes_per_step images_per_sec_bound"
    )
    assert set(agreed.split()) <= set(plan_json(plan, Circumstances(CIFAR)))
    page = plans_page([plan], Circumstances(CIFAR), "rapid <x>")
    assert "NVIDIA GeForce RTX 4090" in page and "rapid &lt;x&gt;" in page


def test_the_loader_is_compared_with_what_the_gpu_takes():
    plan, _ = line_plan(variants=False)
    plan.request.config.data.pipeline = "grain"
    needed = plan.row.speed.predicted[1]
    slow = plan_lines(plan, Circumstances(CIFAR, loader_images_per_sec=needed / 4), "rapid")
    assert any("25 % of that: the loader would set the speed" in line for line in slow)
    fast = plan_lines(plan, Circumstances(CIFAR, loader_images_per_sec=needed * 2), "rapid")
    assert any(line.endswith("enough") for line in fast)


def test_sequences_are_planned_for_the_longest():
    config = rapid.get_config()
    assert sequence_note(config) == ""
    config.data.sequence_buckets = (4, 16, 8)
    assert "planned for the longest, 16" in sequence_note(config)


def test_data_that_is_not_there_is_assumed():
    config = rapid.get_config()
    config.data.dir = "nowhere"
    assert planned_data(config.data) == DataSize(50_000, 10, assumed=True)
    config.data.source = "tfds:imagenet2012"
    assert planned_data(config.data) == DataSize(1_281_167, 1000, assumed=True)


# --- the command and training ---


def test_mistakes_are_answered_before_anything_is_compiled(tmp_path):
    for options, message in (
        (plan_command.Options(("rtx9999",)), "--gpu=rtx9999: unknown"),
        (plan_command.Options(("h100",), topology="8"), "--topology=8"),
        (plan_command.Options(("h100",), batch_sizes=(1,)), "at least 2 images"),
    ):
        with pytest.raises(UserError, match=message):
            plan_command.make_plans(rapid.get_config(), options, Console(io.StringIO()))


def test_a_missing_wheel_gives_the_line_that_installs_it(monkeypatch):
    def version(name):
        if name == "nvidia-cuda-nvcc-cu12":
            raise gpu_compile.metadata.PackageNotFoundError(name)
        return "0.10.2"

    monkeypatch.setattr(gpu_compile.metadata, "version", version)
    line = "pip install jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12==12.9.86"
    with pytest.raises(UserError, match=re.escape(line)):
        gpu_compile.require_wheels()


class Mesh:
    size = 1


class FakeProgram:
    mesh = Mesh()


@pytest.fixture
def planned_training(monkeypatch):
    monkeypatch.setattr(memory_check, "StepCompiler", lambda data, folder: LineCompiler(data=data))
    return {"num_train": 50_000, "num_classes": 10, "gpu": TABLE["rtx4090"]}


def test_training_warns_of_a_step_that_will_not_fit(planned_training):
    config, text = rapid.get_config(), io.StringIO()
    assert not memory_check.warn_if_too_large(config, FakeProgram(), Console(text), **planned_training)
    config.data.batch_size = 8192
    assert memory_check.warn_if_too_large(config, FakeProgram(), Console(text), **planned_training)
    assert "will run out of memory" in text.getvalue() and "--gpu=rtx4090" in text.getvalue()


def test_training_without_a_gpu_or_a_plan_says_nothing(planned_training, monkeypatch):
    config, text = rapid.get_config(), io.StringIO()
    assert not memory_check.warn_if_too_large(config, FakeProgram(), Console(text), **{**planned_training, "gpu": None})

    def broken(data, folder):
        raise UserError("no wheels")

    monkeypatch.setattr(memory_check, "StepCompiler", broken)
    config.data.batch_size = 8192
    assert not memory_check.warn_if_too_large(config, FakeProgram(), Console(text), **planned_training)
    assert text.getvalue() == ""


def test_out_of_memory_ends_with_ways_out(planned_training):
    config = rapid.get_config()
    config.data.batch_size = 8192
    assert memory_check.is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate"))
    assert not memory_check.is_out_of_memory(RuntimeError("INTERNAL: something else"))
    message = memory_check.ways_out_message(config, FakeProgram(), **planned_training)
    assert "config.data.batch_size = 8192" in message and "--config.train.remat=full" in message
    config.data.batch_size = 512
    assert "nvidia-smi" in memory_check.ways_out_message(config, FakeProgram(), **planned_training)
    assert "smaller batch" in memory_check.ways_out_message(config, FakeProgram(), **{**planned_training, "gpu": None})


# --- reading compiled programs ---

HLO = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %y = f32[8,4]{1,0} negate(%x)
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %y)
}

%sliced (q: f32[100,4], j: s32[]) -> f32[1,4] {
  %q = f32[100,4]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %d = f32[1,4]{1,0} dynamic-slice(%q, %j, %z), dynamic_slice_sizes={1,4}
}

ENTRY %main (a: f32[8,4], b: f32[100,4], k: s32[]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[100,4]{1,0} parameter(1)
  %k = s32[] parameter(2)
  %init = (s32[], f32[8,4]{1,0}) tuple(%k, %a)
  %loop = (s32[], f32[8,4]{1,0}) while(%init), body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %v = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  %s = f32[1,4]{1,0} fusion(%b, %k), kind=kLoop, calls=%sliced
  %r = f32[8,4]{1,0} all-reduce(%v), replica_groups=[1,8]<=[8], to_apply=%sum
  %c = (bf16[2,2]{1,0}) custom-call(%v, %r), custom_call_target="__cudnn$conv", metadata={op_name="encoder/conv"}
  %h = () custom-call(%v), custom_call_target="xla_ffi_python_gpu_callback"
  ROOT %o = f32[8,4]{1,0} copy(%r)
}
"""


@pytest.fixture(scope="module")
def module() -> Module:
    return parse_hlo(HLO)


def test_loops_move_their_bytes_as_often_as_they_run(module):
    matrix, row = 8 * 4 * 4, 4 * 4
    loop, fusion, reduce, conv, copy = 5 * 2 * matrix, 2 * row + 4, 2 * matrix, 2 * matrix + 8, 2 * matrix
    assert module.bytes_moved() == loop + fusion + reduce + conv + matrix + copy  # the callback reads a matrix


def test_exchanges_are_counted_by_what_a_device_sends(module):
    (reduce,) = module.collectives()
    assert (reduce.kind, reduce.count, reduce.wire_bytes) == ("all-reduce", 1, 2 * 7 * 128 // 8)
    assert group_size("replica_groups={{0,1,2,3},{4,5,6,7}}") == 4
    assert group_size("replica_groups=mesh['x'=8,'y'=2] {'x'}, to_apply=%s") == 8
    assert group_size("replica_groups=mesh['x'=8,'y'=2] {'x':(1)4,'y'}") == 8


def test_products_tell_their_types_and_callbacks_are_found(module):
    (product,) = module.products()
    assert product.kind == "convolution" and product.types == ("f32", "f32") and "encoder" in product.scope
    assert module.host_calls() == ["xla_ffi_python_gpu_callback"]
