"""Workers that are killed, stopped, or killed again and again: batches stay the same, or an error names the worker."""

import contextlib
import multiprocessing
import os
import signal

import grain
import jax
import numpy as np
import pytest

from jepa_jax.base.errors import DataLost
from jepa_jax.config.groups import DataConfig
from jepa_jax.data import workers as workers_module
from jepa_jax.data.batches import batch_dataset
from jepa_jax.data.workers import SupervisedPool
from tests.sequences import SequenceSource


class Doomed(SequenceSource):
    """Kills every process that loads a batch, except the main one."""

    def batch(self, indices):
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(indices)


class Numbers(grain.MapDataset):
    """Takes integers alone, no slices."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"x": np.full(2, int(index))}


quick = pytest.mark.usefixtures("quick_workers")


def dataset(kind=SequenceSource):
    return batch_dataset(kind(DataConfig(image_size=8, num_train=50, num_test=20), "train"), 16, seed=3)


def pids():
    return {p.name: p.pid for p in multiprocessing.active_children() if p.name.startswith("data-worker")}


@contextlib.contextmanager
def pool(batches, timeout=600.0, first_step=5, count=2, threads=1):
    warnings: list[str] = []

    def warn(text):
        warnings.append(text)
        workers.timeout = timeout  # new workers need time to start

    workers = iter(SupervisedPool(batches, count, threads=threads, timeout=timeout, warn=warn))
    workers.set_state({"next_index": first_step})
    try:
        yield workers, warnings
    finally:
        workers.close()
        assert not pids()


def assert_batches(workers, load, steps):
    for step in steps:
        jax.tree.map(np.testing.assert_array_equal, next(workers), load[step])


def test_a_killed_worker_is_replaced_and_no_batch_is_lost_or_changed(monkeypatch):
    monkeypatch.setattr(workers_module, "KILL_SECONDS", 600.0)
    load = dataset()
    with pool(load) as (workers, warnings):
        assert_batches(workers, load, range(5, 8))
        for pid in pids().values():  # all processes get those, and only the main one acts
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert_batches(workers, load, range(8, 14))
        assert not warnings
        victim = pids()["data-worker-1"]
        os.kill(victim, signal.SIGKILL)
        assert_batches(workers, load, range(14, 22))  # noticed at once: the time limit is longer than the test
        assert victim not in pids().values() and len(pids()) == 2
    [warning] = warnings
    assert f"data worker 2 of 2 (pid {victim}) was ended by SIGKILL" in warning


@quick
def test_a_dataset_that_takes_integers_alone_is_divided_among_workers():
    with pool(Numbers()) as (workers, _):
        assert_batches(workers, Numbers(), range(5, 9))


@quick
def test_threads_in_workers_make_the_same_batches_in_order():
    load = dataset()
    with pool(load, threads=3) as (workers, warnings):
        assert_batches(workers, load, range(5, 16))
        assert workers.get_state() == {"next_index": 16}
        assert not warnings


@quick
def test_a_stopped_worker_is_named_and_replaced_after_the_time_limit():
    load = dataset()
    with pool(load) as (workers, warnings):
        assert_batches(workers, load, range(5, 8))
        victim = pids()["data-worker-0"]
        os.kill(victim, signal.SIGSTOP)
        step = 8
        while not warnings:  # what it had made before is delivered first
            assert step < 16
            # Only the stopped worker, which makes each second batch from the first one on, has a time limit.
            workers.timeout = 1.0 if (step - 5) % 2 == 0 else 600.0
            assert_batches(workers, load, [step])
            step += 1
        assert_batches(workers, load, range(step, step + 4))
    [warning] = warnings
    assert f"data worker 1 of 2 (pid {victim}) delivered nothing for 1 s" in warning


@quick
def test_workers_that_always_die_are_given_up_with_advice():
    with pool(dataset(Doomed)) as (workers, warnings):
        with pytest.raises(DataLost, match=r"data worker 1 of 2 \(pid \d+\) was ended by SIGKILL at batch 5, and so"):
            next(workers)
        assert len(warnings) == 1


@quick
def test_an_error_of_any_class_comes_back_with_its_traceback():
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(a)

    class Bad(SequenceSource):
        def batch(self, indices):
            raise Odd(1, 2)

    with pool(dataset(Bad)) as (workers, _), pytest.raises(RuntimeError, match="in batch(.|\n)*Odd: 1"):
        next(workers)


@quick
def test_a_file_that_vanishes_is_named():
    class Gone(SequenceSource):
        def batch(self, indices):
            return {"x": open("/nowhere/x.npz")}

    with pytest.raises(DataLost, match="/nowhere/x.npz: cannot be read any more .No such file"):
        dataset(Gone)[0]
    with pool(dataset(Gone)) as (workers, _), pytest.raises(DataLost, match="/nowhere/x.npz"):
        next(workers)
