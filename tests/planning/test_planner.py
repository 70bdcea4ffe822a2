"""Plans: the arithmetic, with a compiler whose memory is known."""

import dataclasses

import pytest

from jepa_jax.compiled.kernels import CONVOLUTION
from jepa_jax.data.contract import element_bytes
from jepa_jax.planning.estimate import FITS, FITS_BELOW, NO, TIGHT, exchange_seconds, memory_need
from jepa_jax.planning.factors import LAUNCH_SECONDS, TRAFFIC, factors_of
from jepa_jax.planning.planner import Planner
from jepa_jax.planning.run_cost import PlanContext, run_cost
from jepa_jax.planning.step_compiler import Request
from jepa_jax.program.config import load_config
from jepa_jax.reports.plan_text import plan_json, plan_lines
from tests.planning.line_compiler import CIFAR, GIB, TABLE, LineCompiler, RecomputingCompiler

LABELS = ["as configured", "remat light", "remat full", "2 accumulation steps", "float32"]


def line_plan(
    batch=1024, gpu="rtx4090", per_image=4 * 2**20, state=GIB // 2, topology="1x1x1", pipeline="device", **options
):
    config = load_config("rapid", {"data.batch_size": batch, "data.pipeline": pipeline})
    line = LineCompiler(per_image, state)
    return Planner(line, TABLE).plan(Request(config, TABLE[gpu], topology), **options), line


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
    needed = plan.estimate.speed.images_per_sec / 2
    assert f"{needed:,.0f} samples/s on each host" in "\n".join(plan_lines(plan, PlanContext(CIFAR), "rapid"))


def test_the_largest_batch_ends_at_the_data():
    plan, _ = line_plan(per_image=1024, variants=False)
    assert plan.largest[0][1].at_set and plan.largest[0][1].batch_size == 50_000
    assert "50,000 (all data)" in "\n".join(plan_lines(plan, PlanContext(CIFAR), "rapid"))


def test_variants_have_the_sizes_that_memory_gives_them():
    plan, _ = line_plan()
    labels = {row.label: largest.batch_size for row, largest in plan.largest}
    assert list(labels) == LABELS
    base = labels["as configured"]
    assert labels["remat full"] > 2.5 * base > 1.7 * labels["remat light"] > 2 * base
    assert labels["2 accumulation steps"] == pytest.approx(2 * base, rel=0.1)
    assert labels["float32"] == pytest.approx(base / 2, rel=0.1)


def test_several_gpus_get_a_plan_each():
    config = load_config("rapid")
    requests = [Request(config, TABLE[name]) for name in ("rtx4080", "h100")]
    small, large = (Planner(LineCompiler(), TABLE).plan(request, batch_sizes=(64, 128)) for request in requests)
    assert (small.request.gpu.key, large.request.gpu.key) == ("rtx4080", "h100")
    assert small.estimate.capacity == round(0.9 * TABLE["rtx4080"].memory_bytes)
    assert small.largest[0][1].batch_size < large.largest[0][1].batch_size
    assert [row.batch_size for row in large.batches] == [64, 128]
    assert [row.label for row, _ in large.largest] == LABELS


def test_accumulation_is_left_out_where_devices_do_not_divide_a_part():
    plan, _ = line_plan(batch=24, topology="1x1x8")
    assert [row.label for row, _ in plan.largest] == ["as configured", "remat light", "remat full", "float32"]


def test_a_config_that_does_not_fit_gets_ways_out_that_do():
    plan, _ = line_plan(batch=8192)
    assert plan.estimate.verdict == NO
    assert len(plan.ways_out) >= 3 and all(way.verdict != NO for way in plan.ways_out)
    labels = [way.label for way in plan.ways_out]
    assert "remat full" in labels and "2 accumulation steps" in labels
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
    need = memory_need(5 * GIB, 10 * GIB, data=7)
    assert need.total == need.peak + 7 + need.workspace + need.fragmentation
    assert need.workspace == GIB  # capped


def test_data_beside_the_step_is_the_set_or_the_batches_that_wait():
    on_device, _ = line_plan(variants=False)
    assert on_device.estimate.need.data == 50_000 * element_bytes(CIFAR.spec)
    waiting, _ = line_plan(variants=False, pipeline="grain")
    assert waiting.estimate.need.data == 3 * waiting.estimate.facts.batch_bytes


@pytest.mark.parametrize("share, verdict", [(0.9, FITS), (0.97, TIGHT), (1.05, NO)])
def test_verdicts(share, verdict):
    plan, _ = line_plan(variants=False)
    gpu = dataclasses.replace(TABLE["rtx4090"], memory_bytes=round(plan.estimate.need.total / share / 0.9))
    request = dataclasses.replace(plan.request, gpu=gpu)
    assert dataclasses.replace(plan.estimate, request=request).verdict == verdict


def test_the_speed_is_that_of_the_kernels_at_the_shares_of_the_table():
    plan, _ = line_plan(variants=False)
    speed, gpu = plan.estimate.speed, TABLE["rtx4090"]
    shares = factors_of(gpu).shares
    products = 10**10 * 1024 / (165e12 * shares[CONVOLUTION])
    traffic = plan.estimate.facts.bytes_moved / (gpu.bandwidth_gb_per_second * 1e9 * shares[TRAFFIC])
    assert speed.seconds == pytest.approx(max(products, traffic) + LAUNCH_SECONDS)
    low, high = speed.predicted
    assert low < speed.images_per_sec < high and "within" in speed.error_text


def test_hosts_are_joined_by_a_network_and_not_by_nvlink():
    near, far = (exchange_seconds(16 * 10**9, TABLE["h100"], 8 * hosts, hosts) for hosts in (1, 2))
    assert near == pytest.approx(16 / 450)
    assert far == pytest.approx(16 / 450 + 2 / 50)


def test_recomputation_is_reported_with_its_cost_and_the_need_without_it():
    """XLA stays within 76 % of the card; a program that recomputes is compiled once more without a limit."""
    config = load_config("rapid", {"data.batch_size": 5120})
    line = RecomputingCompiler()
    plan = Planner(line, TABLE).plan(Request(config, TABLE["rtx4090"]), variants=False)
    assert plan.estimate.facts.recomputed == 1 and plan.estimate.speed.recomputing_seconds > 0
    assert plan.estimate.unlimited_peak > 1.1 * plan.estimate.need.peak
    text = "\n".join(plan_lines(plan, PlanContext(CIFAR), "rapid"))
    assert "XLA runs 1 kernels again" in text and "without that the peak would be" in text
    assert sum(request.unlimited for request in line.asked) == 1


def test_the_largest_batch_is_looked_for_beyond_the_line_where_xla_recomputes():
    config = load_config("rapid", {"data.batch_size": 1024})
    line = RecomputingCompiler()
    largest = Planner(line, TABLE).plan(Request(config, TABLE["rtx4090"]), variants=False).largest[0][1]
    assert largest.estimate.verdict == FITS and largest.estimate.facts.recomputed
    assert 7000 < largest.batch_size <= RecomputingCompiler.MOST and len(line.asked) <= 7


def test_the_cost_of_a_run_follows_from_its_length_and_what_is_around_it():
    plan, _ = line_plan(variants=False)
    result = plan_json(plan, PlanContext(CIFAR, price_per_hour=2.0))
    images = 50 * (50_000 // 1024) * 1024
    assert result["steps"] * 1024 == images
    parts = result["run_seconds_by_part"]
    assert parts["training"] == pytest.approx(images / result["images_per_sec"])
    assert parts["evaluation"] > 0 and parts["compilation"] > 0 and parts["checkpoints"] > 0
    fast, slow = result["run_seconds_predicted"]
    assert fast < sum(parts.values()) < slow
    assert result["price_predicted"] == pytest.approx([2 * fast / 3600, 2 * slow / 3600])


def test_a_slow_loader_sets_the_length_of_the_run():
    plan, _ = line_plan(pipeline="grain", variants=False)
    rate = plan.estimate.speed.images_per_sec / 4
    cost = run_cost(plan, PlanContext(CIFAR, loader_images_per_sec=rate))
    assert cost.parts["training"] == pytest.approx(cost.steps * 1024 / rate)


def test_the_json_object_has_the_agreed_keys():
    plan, _ = line_plan(variants=False)
    agreed = (
        "gpu topology batch_size peak_bytes argument_bytes temp_bytes capacity_bytes verdict largest_batch "
        "flops_per_step bytes_per_step images_per_sec_bound"
    )
    assert set(agreed.split()) <= set(plan_json(plan, PlanContext(CIFAR)))


def test_the_loader_is_compared_with_what_the_gpu_takes():
    plan, _ = line_plan(pipeline="grain", variants=False)
    needed = plan.estimate.speed.images_per_sec
    slow = plan_lines(plan, PlanContext(CIFAR, loader_images_per_sec=needed / 4), "rapid")
    assert any("25 % of that: the loader would set the speed" in line for line in slow)
    fast = plan_lines(plan, PlanContext(CIFAR, loader_images_per_sec=needed * 2), "rapid")
    assert any(line.endswith("enough") for line in fast)
