"""One trial: what is measured, how its end is explained, and that a leak is found and nothing else."""

import dataclasses
import itertools
import json
import os
import pathlib
import resource
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jepa_jax.base import processes
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import write_json
from jepa_jax.data.contract import abstract_batch, image_spec
from jepa_jax.data.pipeline import TrainBatches, batches_ready
from jepa_jax.data.sources import open_source
from jepa_jax.experiments import measurement, trial
from jepa_jax.experiments.measurement import TimedSteps, measure, measure_steps, pipeline_fingerprint
from jepa_jax.experiments.settings import KNOBS, Combination, TrialRequest
from jepa_jax.experiments.trial import (
    attempt,
    child_environment,
    device_options,
    finished_result,
    result_of_end,
    run_trial,
)
from jepa_jax.profiling.compilations import CompiledStep, traced_flops
from jepa_jax.program.build import build_program
from jepa_jax.program.config import changed_config
from jepa_jax.runtime import provenance
from jepa_jax.runtime.gpus import NO_CARD, first_gpu, only_gpu
from jepa_jax.runtime.mesh import batch_sharding, make_mesh
from tests.tiny import tiny_config, tiny_masked_config

MB = 10**6
FAULTY_TRIAL = pathlib.Path(__file__).parents[2] / "profiling" / "faulty_sweep.py"


def request_of(config, **changes):
    knobs = {name: changes.pop(name) for name in KNOBS if name in changes}
    return TrialRequest(config.to_dict(), dataclasses.replace(Combination.of(config), **knobs), **changes)


def test_a_combination_is_what_it_makes_of_a_config():
    combination = Combination(64, 2, 2, "bfloat16", "full", "device")  # one core starts two workers at most
    config = tiny_masked_config("ijepa")
    changed = TrialRequest(config.to_dict(), combination).configuration()
    assert Combination.of(changed) == combination
    assert Combination.from_dict(json.loads(json.dumps(combination.to_dict()))) == combination
    assert (changed.data.batch_size, changed.train.accum_steps) == (64, 2)
    assert combination.label == "batch 64 in 2, 2 workers, bfloat16, remat full, device"


def test_a_request_survives_json():
    request = request_of(tiny_config(), batch_size=8, with_evaluation=True, gpu_index=1)
    again = TrialRequest.from_dict(json.loads(json.dumps(request.to_dict())))
    assert again.configuration() == request.configuration()
    assert (again.combination, again.with_evaluation, again.gpu_index) == (request.combination, True, 1)


class LazyMetrics:
    """Metrics of a step whose reading calls a function."""

    packed = None

    def __init__(self, read):
        self.floats = read


def test_the_loop_reads_a_step_after_dispatching_the_next():
    events = []

    def read(number):
        events.append(("read", number))
        return {"loss": 0.0}

    def step(state, batch):
        events.append(("dispatch", state))
        return state + 1, LazyMetrics(lambda: read(state))

    batches = TrainBatches((number, {}) for number in itertools.count())
    device = SimpleNamespace(dispatched=lambda began, loss: None, take=lambda until: [])
    clock, seen = itertools.count().__next__, []
    loop = TimedSteps(step, 0, batches, device, lambda batch, metrics: seen.append(batch), clock)
    loop.take(2)
    loop.discard(5)
    loop.take(1)
    loop.drain()
    assert events == [("dispatch", 0), ("dispatch", 1), ("read", 0), ("dispatch", 2), ("read", 1), ("read", 2)]
    assert len(loop.completed) == 3 and loop.completed == sorted(loop.completed)
    assert seen == [0, 1, 7] and next(batches)[0] == 8  # three for steps, five for nothing


class FormulaMachine:
    """A loader that takes `loading` seconds a batch and keeps up to `room`, and a device; on a clock of their own."""

    def __init__(self, loading, computing, room, leak=0):
        self.now, self.free, self.busy = 0.0, 0.0, []
        self.loading, self.computing, self.room, self.leak = loading, computing, room, leak
        self.made, self.taken, self.made_at = 0, 0, 0.0

    def perf_counter(self):
        return self.now

    def settled(self):
        self.now += 100  # while memory settles the loader makes all it has room for
        return {"host": 10**9 + self.leak * len(self.busy), "mapped": 10**8}

    def batches(self):
        while True:
            self._make()
            if self.made == self.taken:
                self.now = self.made_at = max(self.made_at, 0.0) + self.loading
                self.made += 1
            self.taken += 1
            yield {}, {}

    def _make(self):
        """What was made up to now; a full loader begins with the next batch when one is taken."""
        while self.made - self.taken < self.room and self.made_at + self.loading <= self.now:
            self.made, self.made_at = self.made + 1, self.made_at + self.loading
        if self.made - self.taken >= self.room:
            self.made_at = self.now

    def step(self, state, batch):
        start = max(self.now, self.free)
        self.free = start + self.computing
        self.busy.append((start, self.free))
        end = self.free
        return state, LazyMetrics(lambda: self.read(end))

    def read(self, end):
        self.now = max(self.now, end)
        return {"loss": end}

    def dispatched(self, began, loss):
        pass

    def take(self, until):
        return [(start, min(end, until)) for start, end in self.busy if start < until]


def figures_of(loading, computing, leak=0):
    """Measures eight steps of a machine that is a formula."""
    config = tiny_config(data__num_workers=2, data__prefetch=2)
    machine = FormulaMachine(loading, computing, batches_ready(config.data), leak)
    request = request_of(config, max_batches=8, warmup_batches=2)
    loop = TimedSteps(machine.step, 0, TrainBatches(machine.batches()), machine, clock=machine.perf_counter)
    loop.take(1)
    loop.drain()
    return measure_steps(request, loop, batches_ready(config.data), machine.settled)


@pytest.mark.parametrize(
    ("loading", "computing", "step_time", "wait"),
    [
        (0.25, 0.125, 0.25, 0.5),  # the loader limits
        (0.25, 0.2, 0.25, 0.2),  # hardly: a full buffer would last for long
        (0.25, 0.0, 0.25, 1.0),
        (0.0625, 0.25, 0.25, 0.0),  # the host waits for data in vain: the device has work
    ],
)
def test_a_full_buffer_is_not_measured_and_the_wait_is_that_of_the_device(loading, computing, step_time, wait):
    figures = figures_of(loading, computing)
    assert figures.avg_step_time == pytest.approx(step_time)
    assert figures.step_time_p50 == pytest.approx(step_time)
    assert figures.data_wait_fraction == pytest.approx(wait, abs=1e-6)
    assert (figures.warmup_batches, figures.discarded_batches) == (2, 7)


def test_a_leak_is_found_with_its_slope_and_nothing_else_is():
    """`profiling/check_leak.py` checks this with the memory of the machine."""
    normal, leaking = figures_of(0.25, 0.125), figures_of(0.25, 0.125, leak=MB)
    assert not normal.leak and normal.memory_slope_bytes_per_step == 0 and normal.notes == ()
    assert leaking.leak and leaking.memory_slope_bytes_per_step == pytest.approx(MB)
    assert leaking.notes == ("leak: memory (host) grows by 1 MB per step",)


@pytest.mark.slow
def test_a_confirming_run_evaluates_features_of_the_whole_set(monkeypatch):
    seen = {}
    monkeypatch.setattr(measurement, "knn_accuracy", lambda train, *_, **__: seen.update(knn=train.features.shape))
    true_fit = measurement.fit_softmax

    def fit(x, *arguments, **options):
        seen["probe"] = x.shape
        return true_fit(x, *arguments, **options)

    monkeypatch.setattr(measurement, "fit_softmax", fit)
    config = tiny_config(data__num_train=1000)
    figures = measure(request_of(config, max_batches=2, warmup_batches=1, with_evaluation=True))
    assert figures.finite and seen == {"knn": (1000, 16), "probe": (1000, 16)}


def test_figures_agree_with_each_other():
    row = measure(request_of(tiny_config(), use_dummy_data=True, max_batches=4, warmup_batches=1))
    assert row.measured_batches == 4 and row.samples_processed == 4 * 16
    assert row.samples_per_sec == pytest.approx(64 / row.elapsed_seconds)
    assert row.batches_per_sec * row.avg_step_time == pytest.approx(1)
    assert row.step_time_p50 <= row.step_time_p95
    assert 0 <= row.data_wait_fraction <= 1 and row.flops_per_batch > 0
    assert (row.peak_memory_bytes, row.gpu_sm_util, row.data_source) == (None, None, "dummy")
    assert (row.finite, row.platform, row.device_limit_bytes) == (True, "cpu", None)


def test_equal_programs_have_equal_fingerprints():
    def fingerprint(factor):
        step = CompiledStep(jax.jit(lambda state, batch: (state, factor * batch["x"])))
        return measurement.compile_and_describe(step, 0.0, {"x": np.ones(2, np.float32)})["program_fingerprint"]

    assert fingerprint(2.0) == fingerprint(2.0) != fingerprint(3.0)


class Padded:
    """Sixteen vectors, the last of which are longer, in two buckets."""

    classes = ()

    def __init__(self, bucket=1):
        self.size = (3, 5)[bucket]
        self.spec = {"x": jax.ShapeDtypeStruct((self.size,), np.float32)}
        self.buckets = np.array([0] * 12 + [1] * 4)

    def __len__(self):
        return 16

    def batch(self, indices):
        return {"x": np.asarray(indices, np.float32)[:, None].repeat(self.size, axis=1)}

    def in_bucket(self, bucket):
        return Padded(bucket)


def test_the_longest_batches_are_part_of_every_trial():
    """However rare they are in training, memory has to hold them."""
    config, sharding = tiny_config(data__batch_size=8), batch_sharding(make_mesh(1, 1))
    ((batch, _),) = measurement.largest_batches(config, Padded(), sharding)
    np.testing.assert_array_equal(batch["x"], Padded(1).batch(np.arange(8))["x"])
    assert measurement.largest_batches(config, open_source(config.data, "train"), sharding) == []


def test_the_fingerprint_tells_pipelines_apart_and_knows_a_knob_without_effect():
    config = tiny_config()
    assert pipeline_fingerprint(config.data, False) != pipeline_fingerprint(config.data, True)
    prints = {
        pipeline_fingerprint(tiny_config(data__num_workers=workers, data__pipeline=pipeline).data, False)
        for workers in (0, 1)
        for pipeline in ("grain", "device")
    }
    assert len(prints) == 3  # with pipeline=device the number of workers makes no difference


@pytest.mark.slow
def test_what_remat_computes_again_is_no_use_of_the_device():
    config = tiny_masked_config("ijepa", train__remat="full")
    batch = abstract_batch(image_spec(config.data.image_size), config.data.batch_size)
    shapes = {"num_train": 96, "num_classes": 8, "sample": batch, "mesh": make_mesh(1, 1)}
    program = build_program(config, **shapes)
    state = program.factory.abstract
    useful = traced_flops(program.useful_step.trace(state, batch))
    assert traced_flops(program.train_step.trace(state, batch)) > 1.1 * useful
    plain = build_program(changed_config(config, {"train.remat": "none"}), **shapes)
    assert useful == traced_flops(plain.train_step.trace(state, batch))
    assert plain.useful_step is plain.train_step


def test_a_step_counts_the_operations_of_the_useful_one():
    def make(times):
        def step(state, batch):
            return state, {"loss": sum((batch["x"] @ batch["x"].T).sum() + i for i in range(times))}

        return jax.jit(step)

    step = CompiledStep(make(3), make(1))  # as training and trials make it
    step.compile(0.0, {"x": np.ones([4, 2], np.float32)})
    assert step.flops == 2 * 4 * 4 * 2


@pytest.mark.parametrize(
    ("code", "log", "limited", "status"),
    [
        (-6, "terminate called after throwing an instance of 'std::bad_alloc'", False, "out_of_memory"),
        (1, "LLVM ERROR: out of memory\nAllocation failed", False, "out_of_memory"),
        (1, "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.", False, "out_of_memory"),
        (-6, "env.cc:93] Check failed: Thread x creation via pthread_create() failed.", True, "out_of_memory"),
        (-6, "env.cc:93] Check failed: Thread x creation via pthread_create() failed.", False, "crashed"),
        (-9, "", False, "out_of_memory"),
        (-11, "step 3", False, "crashed"),
        (1, "ValueError: bad", False, "crashed"),
        (0, "", False, "crashed"),
    ],
)
def test_an_end_without_a_result_is_explained(monkeypatch, code, log, limited, status):
    limit = 2**40 if limited else resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    found = result_of_end(processes.Ended(code, False, log), 1.0)
    assert found.status == status
    long_ago = processes.Ended(-11, False, "out of memory, trying again\n" + "step\n" * 20)
    assert result_of_end(long_ago, 1.0).status == "crashed"
    if log and status == "crashed":
        assert log in found.reason
    if code < 0:
        assert processes.signal_name(code) in found.reason


def test_what_a_config_cannot_be_is_refused_without_a_process(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "run", lambda *_, **__: pytest.fail("a process was started"))
    result = run_trial(tmp_path / "0", request_of(tiny_config(), grad_accum_steps=3), time_limit=1)
    assert result.status == "refused" and "config.data.batch_size = 16" in result.reason


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("data.dir = x: not there; fetch it"), "refused"),
        (MemoryError(), "out_of_memory"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."), "out_of_memory"),
        (ValueError("two\nlines"), "crashed"),
    ],
)
def test_what_a_trial_can_explain_itself_is_its_result(error, status):
    def fail(*_, **__):
        raise error

    result = attempt(request_of(tiny_config()), fail)
    assert result.status == status and "\n" not in result.reason and result.reason


def test_one_gpu_is_that_of_those_that_may_be_used(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    variables = child_environment(request_of(tiny_config(), gpu_index=3), tmp_path)
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["CUDA_DEVICE_ORDER"]) == ("3", "PCI_BUS_ID")
    assert variables["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] == "none"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")
    assert only_gpu(1)["CUDA_VISIBLE_DEVICES"] == "GPU-abc" and only_gpu(None) == {}
    for ask in (only_gpu, first_gpu):
        with pytest.raises(UserError, match="--gpu_index = 2: CUDA_VISIBLE_DEVICES = 5, GPU-abc leaves 2 GPUs"):
            ask(2)
    with pytest.raises(UserError, match="--gpu_index = 0: JAX computes on cpu"):
        measure(request_of(tiny_config(), gpu_index=0))


def test_on_a_gpu_trials_have_the_memory_of_training_and_every_repeat_is_compiled(tmp_path, monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    gpu, no_gpu = {"gpu_name": "NVIDIA GeForce RTX 4090"}, {"gpu_name": None}
    assert device_options(no_gpu, None) == {"memory_fraction": None, "compile_anew": False}
    assert device_options(gpu, None) == {"memory_fraction": 0.9, "compile_anew": True}
    variables = child_environment(request_of(tiny_config(), **device_options(gpu, 0.9)), tmp_path)
    assert variables["XLA_CLIENT_MEM_FRACTION"] == "0.9" and variables["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    assert device_options(gpu, None)["memory_fraction"] == 0.6
    variables = child_environment(request_of(tiny_config(), **device_options(gpu, 0.9)), tmp_path)
    assert variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9" and "XLA_CLIENT_MEM_FRACTION" not in variables
    plain = child_environment(request_of(tiny_config()), tmp_path)
    assert "JAX_ENABLE_COMPILATION_CACHE" not in plain


def test_the_cpu_is_not_measured_in_the_name_of_a_gpu(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(provenance, "first_gpu", lambda index: NO_CARD._replace(name="NVIDIA GeForce RTX 4090"))
    with pytest.raises(UserError, match=r"those of the CPU: there is a NVIDIA GeForce RTX 4090.*cuda12.*JAX_PLATFORMS"):
        measure(request_of(tiny_config()))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert provenance.unused_gpu() == ""


@pytest.mark.parametrize("status", ["ok", "crashed"])
def test_a_trial_that_was_done_and_hung_while_closing_counts(tmp_path, monkeypatch, status):
    def hang(command, folder, **_):
        write_json(folder / "result.json", {"status": status, "reason": "x", "samples_per_sec": 1.0})
        return processes.Ended(-9, True, "closing")

    monkeypatch.setattr(processes, "run", hang)
    result = run_trial(tmp_path / "0", request_of(tiny_config()), time_limit=5)
    assert result.status == ("ok" if status == "ok" else "timed_out")
    assert "--time_limit" not in result.reason


def test_a_time_limit_ends_a_trial_and_its_last_words_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(
        processes, "run", lambda *_, **__: processes.Ended(-15, True, "compiling")
    )  # fmt: skip
    result = run_trial(tmp_path / "0", request_of(tiny_config()), time_limit=7, limit_flag="--time_limit")
    assert result.status == "timed_out"
    assert result.reason == "stopped after 7 s (--time_limit: raise it for a slow machine); its last message: compiling"
    searched = run_trial(tmp_path / "0", request_of(tiny_config()), time_limit=7)
    assert searched.reason == "too slow to judge in this budget: one trial needs more than 7 s"
    known = result_of_end(processes.Ended(-15, True, "a trial of about 90 s\na trial of about 61 s\n"), 7.0)
    assert known.reason == "too slow to judge in this budget: one trial needs about 61 s"


def test_the_process_of_a_trial_leaves_its_result(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # one device
    request = request_of(tiny_config(data__source="cifar10", data__dir="nowhere", data__image_size=32))
    result = run_trial(tmp_path / "0", request, time_limit=1200)
    assert result.status == "refused" and "nowhere" in result.reason
    assert finished_result(tmp_path / "0", request) == dataclasses.replace(result, trial_seconds=None)
    assert finished_result(tmp_path / "0", dataclasses.replace(request, max_batches=5)) is None  # another request


@pytest.mark.slow
def test_a_trial_that_really_runs_out_of_memory_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # one device
    monkeypatch.setattr(trial, "CACHE", os.environ["JAX_COMPILATION_CACHE_DIR"])
    monkeypatch.setattr(trial, "TRIAL_COMMAND", (sys.executable, str(FAULTY_TRIAL)))
    monkeypatch.setenv("JEPA_JAX_FAULTS", "0:out_of_memory")
    request = request_of(tiny_config(), use_dummy_data=True, max_batches=4)
    result = run_trial(tmp_path / "0", request, time_limit=1200)
    assert result.status == "out_of_memory" and "Out of memory" in result.reason
