"""Every second of an epoch is counted once, whatever is nested in what and whatever the device does meanwhile."""

import contextlib
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jepa_jax.profiling.accounting import DeviceClock, Ledger, account, breakdown, percentages
from jepa_jax.profiling.sections import COUNTS_FOR, EpochSection, Phase, Section, Timeline

NAMES = [section for section in Section if section not in (Section.COMPILE, Section.OTHER)]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def random_run(generator, timeline, clock, depth=0):
    """Sections in any order and nesting, with time passing before, between and inside them."""
    for _ in range(generator.randrange(1, 5)):
        clock.now += generator.expovariate(1.0) * generator.choice([0, 1e-6, 1e-3, 1.0])
        with timeline.section(generator.choice(NAMES)):
            clock.now += generator.expovariate(1.0)
            if depth < 3:
                random_run(generator, timeline, clock, depth + 1)
        if generator.random() < 0.3:
            timeline.move(Section.COMPILE, generator.random())


def random_intervals(generator, start, end):
    cuts = sorted(generator.uniform(start - 1, end) for _ in range(2 * generator.randrange(0, 12)))
    return list(zip(cuts[::2], cuts[1::2], strict=True))


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_the_percentages_of_an_epoch_add_up_to_100(seed):
    generator, clock = random.Random(seed), Clock()
    timeline = Timeline(clock, keep_segments=True)
    start = clock.now
    random_run(generator, timeline, clock)
    weights = [generator.random() for _ in Phase]
    shares = {phase: weight / sum(weights) for phase, weight in zip(Phase, weights, strict=True)}
    busy = random_intervals(generator, start, clock.now)
    spent = Ledger(timeline, lambda until: busy).update()
    seconds = breakdown(spent, generator.choice([None, shares]), generator.random())
    assert set(seconds) == set(EpochSection) and min(seconds.values()) >= -1e-9
    assert sum(seconds.values()) == pytest.approx(clock.now - start, rel=1e-9)
    assert sum(percentages(seconds).values()) == pytest.approx(100, abs=1e-6)
    assert sum(spent.host.values()) == pytest.approx(clock.now - start, rel=1e-9)


def test_a_nested_section_is_not_counted_twice():
    clock = Clock()
    timeline = Timeline(clock)
    with timeline.section(Section.VALIDATION):
        clock.now += 1
        with timeline.section(Section.CHECKPOINT):
            clock.now += 2
        clock.now += 4
    assert timeline.seconds() == {"other": 0, "validation": 5, "checkpoint": 2}


def test_what_is_known_afterwards_moves():
    clock = Clock()
    timeline = Timeline(clock, keep_segments=True)
    with timeline.section(Section.VALIDATION):
        clock.now += 3
        timeline.move(Section.COMPILE, 1)
        clock.now += 1
    assert timeline.seconds() == {"other": 0, "validation": 3, "compile": 1}
    assert timeline.take_segments()[0] == [("validation", 100, 102), ("compile", 102, 103), ("validation", 103, 104)]


def test_only_what_the_device_does_not_hide_is_charged_to_the_host():
    # A loader of 3 s and a step of 2 s, overlapped: of each 3 s the device waits 1 s for data.
    segments = [(Section.DATA_WAIT, 0.0, 3.0), (Section.DISPATCH, 3.0, 3.5), (Section.DATA_WAIT, 3.5, 6.0)]
    spent = account(segments, [(-1.0, 2.0), (3.5, 5.5)])
    assert spent.exposed == pytest.approx({"data_wait": 1.5, "dispatch": 0.5})
    assert spent.device == pytest.approx(4.0) and spent.seconds == pytest.approx(6.0)
    assert spent.host == pytest.approx({"data_wait": 5.5, "dispatch": 0.5})


def test_the_wait_for_data_is_split_by_what_the_loader_was_doing():
    spent = account([(Section.DATA_WAIT, 0.0, 10.0)], [])
    seconds = breakdown(spent, None, transfer_share=0.25)
    assert seconds[EpochSection.DATA_WAIT] == pytest.approx(7.5)
    assert seconds[EpochSection.DATA_TRANSFER] == pytest.approx(2.5)


PAUSES = {Section.VALIDATION: 0.5, Section.VISUALIZATION: 0.3, Section.CHECKPOINT: 0.2}


@pytest.mark.parametrize("wait", [0.05, 0.2, 0.8])
def test_waits_and_pauses_of_a_simulated_epoch_are_found_exactly(wait):
    """Steps of 0.2 s run while the host waits for the metrics; nothing else hides behind them."""
    clock, busy = Clock(), []
    timeline = Timeline(clock, keep_segments=True)
    for _ in range(4):
        with timeline.section(Section.DATA_WAIT):
            clock.now += wait
        with timeline.section(Section.DEVICE_WAIT):
            busy.append((clock.now, clock.now + 0.2))
            clock.now += 0.2
    for section, seconds in PAUSES.items():
        with timeline.section(section):
            clock.now += seconds
    found = percentages(breakdown(Ledger(timeline, lambda until: busy).update(), None, 0.0))
    total = 4 * (wait + 0.2) + sum(PAUSES.values())
    assert found[EpochSection.DATA_WAIT] == pytest.approx(100 * 4 * wait / total)
    for section, seconds in PAUSES.items():
        assert found[COUNTS_FOR[section]] == pytest.approx(100 * seconds / total)


class Step:
    """A step on a device, which is done when the test says so."""

    def __init__(self):
        self.waited_for, self.done = threading.Event(), threading.Event()

    def wait(self):
        self.waited_for.set()
        assert self.done.wait(60)


def test_the_device_clock_knows_when_steps_ran_without_the_caller_waiting():
    clock, first, second = Clock(), Step(), Step()
    device = DeviceClock(clock, wait=Step.wait, inline=lambda step: False)
    with contextlib.ExitStack() as stack:
        stack.callback(device.close)
        stack.callback(second.done.set)
        stack.callback(first.done.set)
        device.dispatched(clock.now, first)
        device.dispatched(clock.now, second)  # neither is done: nobody waited
        assert first.waited_for.wait(60)
        clock.now = 101.0
        first.done.set()
        assert second.waited_for.wait(60)  # the end of the first has been noted
        clock.now = 101.5
        assert device.take(101.5) == [(100.0, 101.0), (101.0, 101.5)]  # the second step is cut in two here
        clock.now = 102.0
    assert device.take(103.0) == [(101.5, 102.0)]


def test_a_step_computed_inside_its_call_began_with_the_call():
    clock, step = Clock(), Step()
    step.done.set()
    device = DeviceClock(clock, wait=Step.wait, inline=lambda step: True)
    clock.now = 101.0
    device.dispatched(100.0, step)
    device.close()
    assert device.take(102.0) == [(100.0, 101.0)]


def test_steps_that_are_not_watched_are_divided_like_those_that_are():
    """Of each step of 1 s the device waits 0.25 s for data and hides 0.25 s of logging; validation hides nothing."""
    clock, busy = Clock(), []
    timeline = Timeline(clock, keep_segments=True)
    ledger = Ledger(timeline, lambda until: [interval for interval in busy if interval[1] <= until])
    for step in range(40):
        if step % 20 == 0:
            ledger.watch()
            busy.clear()
        elif step % 20 == 5:
            ledger.rest()
        with timeline.section(Section.DATA_WAIT):
            clock.now += 0.25
        busy += [(clock.now, clock.now + 0.75)] if step % 20 < 5 else []
        with timeline.section(Section.DEVICE_WAIT):
            clock.now += 0.5
        with timeline.section(Section.LOGGING):
            clock.now += 0.25
    with timeline.section(Section.VALIDATION):
        clock.now += 7
    spent = ledger.cut()
    assert spent.seconds == ledger.total.seconds == pytest.approx(47) and spent.device == pytest.approx(30)
    exposed = {section: value for section, value in spent.exposed.items() if value}
    assert exposed == pytest.approx({Section.DATA_WAIT: 10, Section.VALIDATION: 7})
    assert ledger.cut().seconds == 0
