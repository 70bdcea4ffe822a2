"""Plans: the arithmetic, with a compiler whose memory is known, and the command."""

import dataclasses
import io

import pytest

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.planning import plan_command
from jepa_jax.planning.estimate import FITS, FITS_BELOW, NO, TIGHT, memory_need
from jepa_jax.planning.plan_text import PlanContext, plan_json, plan_lines
from jepa_jax.planning.planner import Planner
from jepa_jax.planning.step_compiler import Request
from jepa_jax.program.config import load_config
from tests.planning.line_compiler import CIFAR, GIB, TABLE, LineCompiler


def line_plan(
    batch=1024, gpu="rtx4090", per_image=4 * 2**20, state=GIB // 2, topology="1x1x1", pipeline="device", **options
):
    config = load_config("rapid", {"data.batch_size": batch, "data.pipeline": pipeline})
    line = LineCompiler(per_image, state)
    return Planner(line, TABLE).plans([Request(config, TABLE[gpu], topology)], **options)[0], line


def test_the_largest_batch_is_found_with_few_compilations():
    plan, line = line_plan(variants=False)
    largest = plan.largest[0][1]
    assert largest.estimate.verdict == FITS
    assert FITS_BELOW - largest.estimate.need.total / largest.estimate.capacity < 0.03
    assert len(line.asked) <= 3
    assert largest.batch_size % 8 == 0


def test_the_largest_batch_is_also_found_from_one_that_does_not_fit():
    plan, line = line_plan(batch=32768, variants=False)
    assert plan.estimate.verdict == NO
    assert 4000 < plan.largest[0][1].batch_size < 6000
    assert plan.largest[0][1].estimate.verdict == FITS


def test_the_largest_batch_is_not_one_grain_short_where_grains_are_large():
    plan, _ = line_plan(batch=8, per_image=1100 * 2**20, state=2**20, variants=False)
    need = plan.largest[0][1].estimate.need
    assert plan.largest[0][1].batch_size == 16
    assert need.total + 8 * 1100 * 2**20 > FITS_BELOW * plan.estimate.capacity  # another grain would not fit


def test_the_loader_of_each_host_feeds_its_own_devices():
    plan, _ = line_plan(batch=1024, topology="1x2x8", pipeline="grain", variants=False)
    needed = plan.estimate.speed.predicted[1] / 2
    assert f"{needed:,.0f} samples/s on each host" in "\n".join(plan_lines(plan, PlanContext(CIFAR), "rapid"))


def test_the_largest_batch_ends_at_the_data():
    plan, _ = line_plan(per_image=1024, variants=False)
    assert plan.largest[0][1].at_set and plan.largest[0][1].batch_size == 50_000
    assert "50,000 (all data)" in "\n".join(plan_lines(plan, PlanContext(CIFAR), "rapid"))


def test_variants_have_the_sizes_that_memory_gives_them():
    plan, _ = line_plan()
    labels = {row.label: largest.batch_size for row, largest in plan.largest}
    assert list(labels) == ["as configured", "remat", "2 accumulation steps", "float32"]
    base = labels["as configured"]
    assert labels["remat"] > 2.5 * base
    assert labels["2 accumulation steps"] == pytest.approx(2 * base, rel=0.1)
    assert labels["float32"] == pytest.approx(base / 2, rel=0.1)


def test_several_gpus_get_a_plan_each():
    config = load_config("rapid")
    requests = [Request(config, TABLE[name]) for name in ("rtx4080", "h100")]
    small, large = Planner(LineCompiler(), TABLE).plans(requests, batch_sizes=(64, 128))
    assert (small.request.gpu.key, large.request.gpu.key) == ("rtx4080", "h100")
    assert small.estimate.capacity == TABLE["rtx4080"].memory_bytes
    assert small.largest[0][1].batch_size < large.largest[0][1].batch_size
    assert [row.batch_size for row in large.batches] == [64, 128]
    assert [row.label for row, _ in large.largest] == ["as configured", "remat", "2 accumulation steps", "float32"]


def test_accumulation_is_left_out_where_devices_do_not_divide_a_part():
    plan, _ = line_plan(batch=24, topology="1x1x8")
    assert [row.label for row, _ in plan.largest] == ["as configured", "remat", "float32"]


def test_a_config_that_does_not_fit_gets_ways_out_that_do():
    plan, _ = line_plan(batch=8192)
    assert plan.estimate.verdict == NO
    assert len(plan.ways_out) >= 3 and all(way.verdict != NO for way in plan.ways_out)
    labels = [way.label for way in plan.ways_out]
    assert "remat" in labels and "2 accumulation steps" in labels
    assert plan.ways_out[-1].changes == {"gpu": "a100-40"}  # the smallest card that holds it comes last
    speeds = [way.speed.images_per_sec for way in plan.ways_out[:-1]]
    assert speeds == sorted(speeds, reverse=True)
    text = "\n".join(plan_lines(plan, PlanContext(CIFAR), "rapid"))
    assert "--config.train.remat=full" in text and "--config.train.accum_steps=2" in text


def test_changes_are_combined_when_one_is_not_enough():
    plan, _ = line_plan(batch=4096, per_image=80 * 2**20, gpu="rtx4080")
    assert any(set(way.changes) >= {"train.remat", "train.accum_steps"} or way.label.startswith("batch")
               for way in plan.ways_out)  # fmt: skip
    assert len(plan.ways_out) >= 2


def test_a_model_that_is_too_large_is_divided_by_fsdp():
    plan, _ = line_plan(batch=64, state=40 * GIB, topology="1x1x8", variants=False)
    assert plan.estimate.verdict == NO and plan.largest[0][1].batch_size == 0
    assert "FSDP over 8" in [way.label for way in plan.ways_out]


def test_the_margin_is_stated_part_by_part():
    facts = LineCompiler().all_facts([Request(load_config("rapid"), TABLE["rtx4090"])])[0]
    config = load_config("rapid")
    need = memory_need(dataclasses.replace(facts, largest_convolution_bytes=10 * GIB, devices=8), config, data_bytes=7)
    assert need.total == need.peak + 7 + need.context + need.workspace + need.collectives + need.fragmentation
    assert need.workspace == GIB and need.collectives > 0  # the workspace is capped
    assert memory_need(facts, config).collectives == 0
    config = load_config("rapid", {"data.pipeline": "grain"})
    assert memory_need(facts, config).data == 3 * facts.batch_bytes  # batches that wait on the device


@pytest.mark.parametrize("share, verdict", [(0.9, FITS), (0.97, TIGHT), (1.05, NO)])
def test_verdicts(share, verdict):
    plan, _ = line_plan(variants=False)
    gpu = dataclasses.replace(TABLE["rtx4090"], memory_bytes=round(plan.estimate.need.total / share))
    request = dataclasses.replace(plan.request, gpu=gpu)
    assert dataclasses.replace(plan.estimate, request=request).verdict == verdict


def test_speed_is_the_slower_of_products_and_traffic():
    plan, _ = line_plan(variants=False)
    speed, gpu = plan.estimate.speed, TABLE["rtx4090"]
    assert speed.compute_seconds == pytest.approx(10**10 * 1024 / 165e12)
    assert speed.memory_seconds == pytest.approx(plan.estimate.facts.bytes_moved / (gpu.bandwidth_gb_per_second * 1e9))
    assert speed.images_per_sec == pytest.approx(1024 / max(speed.compute_seconds, speed.memory_seconds))


def test_the_cost_of_a_run_follows_from_its_length():
    plan, _ = line_plan(variants=False)
    result = plan_json(plan, PlanContext(CIFAR, price_per_hour=2.0))
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
    assert set(agreed.split()) <= set(plan_json(plan, PlanContext(CIFAR)))


def test_the_loader_is_compared_with_what_the_gpu_takes():
    plan, _ = line_plan(pipeline="grain", variants=False)
    needed = plan.estimate.speed.predicted[1]
    slow = plan_lines(plan, PlanContext(CIFAR, loader_images_per_sec=needed / 4), "rapid")
    assert any("25 % of that: the loader would set the speed" in line for line in slow)
    fast = plan_lines(plan, PlanContext(CIFAR, loader_images_per_sec=needed * 2), "rapid")
    assert any(line.endswith("enough") for line in fast)


# --- the command ---


def test_mistakes_are_answered_before_anything_is_compiled(tmp_path):
    for options, message in (
        (plan_command.PlanOptions(("rtx9999",)), "--gpu=rtx9999: unknown"),
        (plan_command.PlanOptions(("h100",), topology="8"), "--topology=8"),
        (plan_command.PlanOptions(("h100",), batch_sizes=(1,)), "at least 2 samples"),
        (plan_command.PlanOptions(("h100",), topology="1x1x8", batch_sizes=(500,)), "use a multiple of 8"),
    ):
        with pytest.raises(UserError, match=message):
            plan_command.make_plans(load_config("rapid"), options, Console(io.StringIO()))
