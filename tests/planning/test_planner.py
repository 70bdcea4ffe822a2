"""Plans: the arithmetic, with a compiler whose memory is known, and the command."""

import dataclasses
import io

import pytest

from configs import rapid
from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import image_spec
from jepa_jax.data.facts import DataFacts
from jepa_jax.planning import plan_command
from jepa_jax.planning.gpu_compile import Facts, Request
from jepa_jax.planning.planner import FITS, FITS_BELOW, NO, TIGHT, Planner, memory_need
from jepa_jax.reports.plan_report import Circumstances, plan_json, plan_lines
from jepa_jax.runtime.hardware import load_table

GIB = 2**30
TABLE = load_table()
CIFAR = DataFacts(50_000, 10, image_spec(32))


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
            alias_bytes=state, temp_bytes=peak - state, peak_bytes=peak, state_bytes=state,
            parameter_bytes=state // 2, optimizer_bytes=state // 2, target_bytes=0, batch_bytes=3072 * batch // devices,
            flops=10**10 * batch, bytes_moved=round(5 * each * images), collectives={},
            largest_convolution_bytes=0, convolutions=1, encoder_float32_products=[], host_calls=[],
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


def test_the_largest_batch_is_not_one_grain_short_where_grains_are_large():
    plan, _ = line_plan(batch=8, per_image=1100 * 2**20, state=2**20, variants=False)
    need = plan.largest[0][1].row.need
    assert plan.largest[0][1].batch_size == 16
    assert need.total + 8 * 1100 * 2**20 > FITS_BELOW * plan.row.capacity  # another grain would not fit


def test_the_loader_of_each_host_feeds_its_own_devices():
    plan, _ = line_plan(batch=1024, topology="1x2x8", variants=False)
    plan.request.config.data.pipeline = "grain"
    needed = plan.row.speed.predicted[1] / 2
    assert f"{needed:,.0f} images/s on each host" in "\n".join(plan_lines(plan, Circumstances(CIFAR), "rapid"))


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
    assert memory_need(facts, config).data == 3 * facts.batch_bytes  # batches that wait on the device


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


def test_the_loader_is_compared_with_what_the_gpu_takes():
    plan, _ = line_plan(variants=False)
    plan.request.config.data.pipeline = "grain"
    needed = plan.row.speed.predicted[1]
    slow = plan_lines(plan, Circumstances(CIFAR, loader_images_per_sec=needed / 4), "rapid")
    assert any("25 % of that: the loader would set the speed" in line for line in slow)
    fast = plan_lines(plan, Circumstances(CIFAR, loader_images_per_sec=needed * 2), "rapid")
    assert any(line.endswith("enough") for line in fast)


# --- the command ---


def test_mistakes_are_answered_before_anything_is_compiled(tmp_path):
    for options, message in (
        (plan_command.Options(("rtx9999",)), "--gpu=rtx9999: unknown"),
        (plan_command.Options(("h100",), topology="8"), "--topology=8"),
        (plan_command.Options(("h100",), batch_sizes=(1,)), "at least 2 images"),
        (plan_command.Options(("h100",), topology="1x1x8", batch_sizes=(500,)), "use a multiple of 8"),
    ):
        with pytest.raises(UserError, match=message):
            plan_command.make_plans(rapid.get_config(), options, Console(io.StringIO()))
