"""Warnings: thresholds, what to change, and a gain that follows from the measured shares."""

import random

import pytest

from jepa_jax.profiling.accounting import account
from jepa_jax.profiling.bottlenecks import Setting, find_bottlenecks, find_leak
from jepa_jax.profiling.epoch_record import Block, Loading, make_record
from jepa_jax.profiling.metrics import epoch_metrics
from jepa_jax.profiling.monitor import join_gpus

SHARES = {"forward": 0.3, "backward": 0.6, "optimizer": 0.05, "augment": 0.05}


def setting(**changes):
    values = dict(num_workers=2, pipeline="grain", cores=16, platform="gpu", precision="float32", batch_size=64)
    return Setting(**(values | changes))


def sample(step=0, ram=40.0, process=2.0, gpus=()):
    return {
        "time": float(step), "step": step, "cpu_percent": 50.0, "process_cpu_percent": 90.0, "ram_percent": ram,
        "ram_available_gb": 16.0, "process_ram_gb": process, "gpus": list(gpus),
    }  # fmt: skip


def record(device=100.0, epoch=2, transfer=0.0, samples=(), compilations=0, **host):
    """An epoch of 100 steps in which the device computed so many seconds and host sections were exposed."""
    at, segments = device, [("device_wait", 0.0, device)]
    for name, seconds in host.items():
        segments.append((name, at, at + seconds))
        at += seconds
    between = sum(host.get(name, 0) for name in ("validation", "visualization", "checkpoint", "compile", "profiler"))
    block = Block(100, account(segments, [(0.0, device)]), [(at - between) / 100] * 100)
    return make_record(
        epoch=epoch, last_step=100, blocks=[block], shares=SHARES, traced=True,
        loading=Loading(100, 50.0, 100 * (1 - transfer), 100 * transfer), counts={"compilation": compilations},
        batch_size=64, flops_per_step=1e12, peak_flops=10e12, samples=samples or [sample()],
    )  # fmt: skip


def named(found):
    return {bottleneck.name: bottleneck for bottleneck in found if bottleneck.warning}


def test_a_slow_loader_is_named_with_the_workers_it_needs():
    found = named(find_bottlenecks(record(device=59.0, data_wait=41.0), setting()))["data_generation"]
    assert "data wait is 41 % of the epoch; with data.num_workers 2 -> 4 at most 1.7x" in found.message
    assert found.severity == pytest.approx(0.41)


@pytest.mark.parametrize("share, raised", [(0.20, False), (0.29, False), (0.31, True), (0.5, True), (0.8, True)])
def test_data_is_a_bottleneck_above_30_percent_of_a_batch(share, raised):
    row = record(device=100 * (1 - share), data_wait=100 * share)
    found = find_bottlenecks(row, setting())
    assert ("data_generation" in named(found)) == raised
    import dataclasses

    from jepa_jax.profiling.bottlenecks import as_rows

    metrics = epoch_metrics(dataclasses.replace(row, bottlenecks=as_rows(found)))
    assert metrics["bottleneck_data_generation"] == int(raised)
    assert metrics["data_gen_bottleneck_severity"] == pytest.approx(share if raised else 0)
    assert metrics["data_gen_percentage"] == pytest.approx(100 * share)


def test_the_gain_of_workers_ends_at_the_cores():
    message = named(find_bottlenecks(record(device=20.0, data_wait=80.0), setting(cores=4)))["data_generation"].message
    assert "data.num_workers 2 -> 4 at most 2.0x" in message and "10 would feed the device" in message


def test_each_kind_has_its_own_name_and_gain():
    full = join_gpus([{"throttled": 1.0, "clock_mhz": 1260.0, "max_clock_mhz": 2520.0}],
                     [{"allocated_gb": 19.0, "allocated_peak_gb": 19.5, "allocator_limit_gb": 20.0}])  # fmt: skip
    cases = {
        "transfer": (record(device=80.0, data_wait=20.0, transfer=1.0), "at most 1.2x"),
        "dispatch": (record(device=60.0, dispatch=40.0), "64 -> 128 (with its own learning rate) at most 1.25x"),
        "checkpoint": (record(device=50.0, checkpoint=50.0), "at most 2.00x"),
        "validation": (record(device=50.0, validation=50.0), "at most 2.00x"),
        "recompiling": (record(device=50.0, compile=50.0, compilations=3), "3 compilations in epoch 2 took 50 %"),
        "memory": (record(samples=[sample(ram=91.0)]), "91 % of the RAM"),
        "gpu_0_memory": (record(samples=[sample(gpus=full)]), "used 98 % of its 20.0 GiB"),
        "gpu_0_throttled": (record(samples=[sample(gpus=full)]), "clock 1260 of 2520 MHz"),
    }
    for name, (row, words) in cases.items():
        found = named(find_bottlenecks(row, setting()))
        assert name in found and words in found[name].message, (name, found)
        assert 0 < found[name].severity <= 1


def test_a_device_that_is_busy_all_the_time_is_a_remark_not_a_warning():
    found = find_bottlenecks(record(device=98.0, data_wait=2.0), setting())
    assert [b.name for b in found] == ["compute"] and not found[0].warning
    assert "at most 1.02x" in found[0].message and "bfloat16" in found[0].message


def test_the_first_epoch_may_compile():
    assert not named(find_bottlenecks(record(epoch=1, compile=50.0, compilations=1), setting()))


def test_a_leak_shows_after_a_few_dozen_steps():
    generator = random.Random(0)
    noise = [generator.gauss(0, 0.01) for _ in range(32)]
    steps = list(range(32))
    leak = find_leak(steps, [4 + 0.02 * step + noise[step] for step in steps], free_gb=16.0)
    assert leak is not None and leak.gb_per_step == pytest.approx(0.02, rel=0.1)
    assert leak.steps_left == pytest.approx(800, rel=0.1)
    history = [sample(step, process=4 + 0.02 * step) for step in range(40)]
    assert "memory_leak" in named(find_bottlenecks(record(), setting(), history))


@pytest.mark.parametrize("at", range(4, 62, 5))
def test_a_jump_is_no_leak(at):
    """The first evaluation of a kind takes memory that stays taken."""
    generator = random.Random(at)
    used = [(4.0 if step < at else 4.4) + generator.gauss(0, 0.002) for step in range(64)]
    assert find_leak(list(range(64)), used, free_gb=16.0) is None


@pytest.mark.parametrize("shape", ["flat", "filling", "two jumps"])
def test_memory_that_settles_is_no_leak(shape):
    generator = random.Random(1)
    used = {
        "flat": [4 + generator.gauss(0, 0.05) for _ in range(64)],
        "filling": [6 - 2 * 0.9**step for step in range(64)],
        "two jumps": [4.0 + (step > 20) + (step > 40) for step in range(64)],
    }[shape]
    assert find_leak(list(range(64)), used, free_gb=16.0) is None
