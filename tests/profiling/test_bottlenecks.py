"""Warnings: thresholds, what to change, and a gain that follows from the measured shares."""

import dataclasses
import random
import re

import pytest

from jepa_jax.profiling.bottlenecks import Setting, find_bottlenecks
from jepa_jax.profiling.metrics import epoch_metrics
from jepa_jax.profiling.monitor import join_gpus
from jepa_jax.profiling.sections import Section
from tests.profiling.records import record, sample


def setting(**changes):
    values = dict(num_workers=2, pipeline="grain", cores=16, platform="gpu", precision="float32", batch_size=64)
    return Setting(**(values | changes))


def named(found):
    return {bottleneck.name: bottleneck for bottleneck in found if bottleneck.warning}


def test_a_slow_loader_is_named_with_the_workers_it_needs():
    found = named(find_bottlenecks(record({Section.DATA_WAIT: 41.0}, device=59.0), setting()))["data_generation"]
    assert "data wait is 41 % of the epoch; with data.num_workers 2 -> 4 at most 1.7x" in found.message
    assert found.severity == pytest.approx(0.41)


@pytest.mark.parametrize("share, raised", [(0.20, False), (0.29, False), (0.31, True), (0.5, True), (0.8, True)])
def test_data_is_a_bottleneck_above_30_percent_of_a_batch(share, raised):
    row = record({Section.DATA_WAIT: 100 * share}, device=100 * (1 - share))
    found = find_bottlenecks(row, setting())
    assert ("data_generation" in named(found)) == raised
    metrics = epoch_metrics(dataclasses.replace(row, bottlenecks=[dataclasses.asdict(one) for one in found]))
    assert metrics["bottleneck_data_generation"] == int(raised)
    assert metrics["data_gen_bottleneck_severity"] == pytest.approx(share if raised else 0)
    assert metrics["data_gen_percentage"] == pytest.approx(100 * share)


def test_the_gain_of_workers_ends_at_the_cores():
    found = named(find_bottlenecks(record({Section.DATA_WAIT: 80.0}, device=20.0), setting(cores=4)))
    message = found["data_generation"].message
    assert "data.num_workers 2 -> 4 at most 2.0x" in message and "10 would feed the device" in message


def test_more_workers_than_cores_are_never_advised():
    for workers, words in ((16, "data.num_workers 16 -> 2 is enough"), (2, "the machine has only 2 cores")):
        found = find_bottlenecks(record({Section.DATA_WAIT: 60.0}, device=40.0), setting(num_workers=workers, cores=2))
        message = named(found)["data_generation"].message
        assert (
            words in message and "data.pipeline=device" in message and "-> 17" not in message and "-> 3" not in message
        )


def test_each_kind_has_its_own_name_and_gain():
    full = join_gpus([{"throttled": 1.0, "clock_mhz": 1260.0, "max_clock_mhz": 2520.0}],
                     [{"allocated_gb": 19.0, "allocated_peak_gb": 19.5, "allocator_limit_gb": 20.0}])  # fmt: skip
    cases = {
        "transfer": (record({Section.DATA_WAIT: 20.0}, device=80.0, transfer=1.0), "at most 1.2x"),
        "dispatch": (
            record({Section.DISPATCH: 40.0}, device=60.0),
            "64 -> 128 (with its own learning rate) at most 1.25x",
        ),
        "checkpoint": (record({Section.CHECKPOINT: 50.0}, device=50.0), "at most 2.00x"),
        "validation": (record({Section.VALIDATION: 50.0}, device=50.0), "at most 2.00x"),
        "recompiling": (
            record({Section.COMPILE: 50.0}, device=50.0, compilations=3),
            "3 compilations in epoch 2 took 50 %",
        ),
        "memory": (record(samples=[sample(ram=91.0)]), "91 % of the RAM"),
        "gpu_0_memory": (record(samples=[sample(gpus=full)]), "used 98 % of its 20.0 GiB"),
        "gpu_0_throttled": (record(samples=[sample(gpus=full)]), "clock 1260 of 2520 MHz"),
    }
    for name, (row, words) in cases.items():
        found = named(find_bottlenecks(row, setting()))
        assert name in found and words in found[name].message, (name, found)
        assert 0 < found[name].severity <= 1


def test_a_device_that_is_busy_all_the_time_is_a_remark_not_a_warning():
    found = find_bottlenecks(record({Section.DATA_WAIT: 2.0}, device=98.0), setting())
    assert [b.name for b in found] == ["compute"] and not found[0].warning
    assert "at most 1.02x" in found[0].message and "bfloat16" in found[0].message


def test_the_first_epoch_may_compile():
    assert not named(find_bottlenecks(record({Section.COMPILE: 50.0}, epoch=1, compilations=1), setting()))


def leak_of(used):
    """Returns the warning about samples of the process's memory in GiB, one per step."""
    history = [sample(step, process=value) for step, value in enumerate(used)]
    return named(find_bottlenecks(record(), setting(), history)).get("memory_leak")


def test_a_leak_shows_after_a_few_dozen_steps():
    generator = random.Random(0)
    leak = leak_of([4 + 0.02 * step + generator.gauss(0, 0.01) for step in range(32)])
    rate, left = (float(number.replace(",", "")) for number in re.findall(r"[\d,.]+(?= MiB| steps)", leak.message))
    assert rate == pytest.approx(1024 * 0.02, rel=0.1) and left == pytest.approx(800, rel=0.1)
    assert leak.severity == 1 and leak_of([4 + 0.02 * step for step in range(15)]) is None  # too few samples


@pytest.mark.parametrize("at", range(4, 62, 5))
def test_a_jump_is_no_leak(at):
    """The first evaluation of a kind takes memory that stays taken."""
    generator = random.Random(at)
    assert leak_of([(4.0 if step < at else 4.4) + generator.gauss(0, 0.002) for step in range(64)]) is None


@pytest.mark.parametrize("shape", ["flat", "filling", "two jumps"])
def test_memory_that_settles_is_no_leak(shape):
    generator = random.Random(1)
    used = {
        "flat": [4 + generator.gauss(0, 0.05) for _ in range(64)],
        "filling": [6 - 2 * 0.9**step for step in range(64)],
        "two jumps": [4.0 + (step > 20) + (step > 40) for step in range(64)],
    }[shape]
    assert leak_of(used) is None
