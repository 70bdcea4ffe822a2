"""The sweep around its trials: order, rows, what is skipped, what survives an interruption, what may be resumed."""

import dataclasses
import json
import os
import pathlib
import signal
import sys
import tomllib

import jsonschema
import pytest

from jepa_jax.base import processes
from jepa_jax.base.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, UserError
from jepa_jax.base.files import write_json
from jepa_jax.base.signals import Interrupted
from jepa_jax.cli.throughput import SWEEP
from jepa_jax.experiments import sweep as sweep_module
from jepa_jax.experiments import trial
from jepa_jax.experiments.rows import SweepRow, TrialFigures, TrialResult, rows_to_json, skip_larger
from jepa_jax.experiments.settings import FLAGS, Combination, all_combinations, grid_values
from jepa_jax.experiments.sweep import Sweep, load_document, make_document, open_trials, run_sweep, summarise
from jepa_jax.program.config import load_config
from tests.tiny import tiny_config

ROOT = pathlib.Path(__file__).parents[2]
SCHEMA = jsonschema.Draft202012Validator(json.loads((ROOT / "docs" / "reference" / "sweep.schema.json").read_text()))


def ok(speed, **more):
    figures = TrialFigures(
        speed, step_time_p50=8 / speed, step_time_p95=9 / speed, samples_processed=80, measured_batches=10,
        elapsed_seconds=80 / speed, compile_seconds=3.0, process_memory_bytes=10**9, data_wait_fraction=0.1, mfu=0.2,
        program_fingerprint="p", pipeline_fingerprint="q", data_source="dummy", platform="cpu", warmup_batches=4,
        discarded_batches=0, flops_per_batch=1, devices="1 x cpu",
    )  # fmt: skip
    return TrialResult("ok", figures=dataclasses.replace(figures, **more))


def in_round(number, result):
    return dataclasses.replace(result, round=number)


@pytest.fixture
def make(tmp_path):
    def make(config=None, repeats=2, **texts):
        config = config or tiny_config()
        values = grid_values(config, texts)
        return Sweep(config, "tiny", values, tmp_path / "sweep.json", use_dummy_data=True, repeats=repeats)

    return make


@pytest.fixture
def trials(monkeypatch):
    """Stands in for the processes: notes what is run and gives what `ends` says, or a speed by batch and round."""
    run, ends = [], {}

    def run_trial(folder, request, *, time_limit, limit_flag, on_tick):
        assert limit_flag == "--time_limit"
        batch = request.combination.batch_size
        run.append((batch, request.combination.grad_accum_steps))
        end = ends.get(folder.name, ok(100.0 * batch))
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(sweep_module, "run_trial", run_trial)
    run_trial.run, run_trial.ends = run, ends
    return run_trial


def test_rounds_hold_every_trial_once_and_start_elsewhere():
    rows = [SweepRow(Combination(8 * (i + 1), 0, 1, "float32", "none", "grain")) for i in range(12)]
    rounds = [[index for index, found in open_trials(rows, 3) if found == number] for number in range(3)]
    assert all(sorted(order) == list(range(12)) for order in rounds)
    assert [order[0] for order in rounds] == [0, 4, 8]
    assert [index for index, _ in open_trials(rows[:3], 2)] == [0, 1, 2, 1, 2, 0]


def test_flags_not_given_are_the_configs_own(make):
    config = tiny_config()
    own = grid_values(config, {})
    assert own == {
        "batch_sizes": [16], "num_workers": [0], "grad_accum": [1], "precisions": ["float32"], "remats": ["none"],
        "pipelines": ["grain"], "prefetch": [2], "worker_threads": [1],
    }  # fmt: skip
    sweep = make(batch_sizes="32,8,8", pipelines="device,grain")
    assert [(c.batch_size, c.pipeline) for c in all_combinations(sweep.values)] == [
        (8, "device"), (8, "grain"), (32, "device"), (32, "grain"),
    ]  # fmt: skip


def test_workers_that_have_nothing_to_do_are_no_combination_of_their_own(make):
    sweep = make(num_workers="2,4", pipelines="grain,device")
    assert [(c.num_workers, c.pipeline) for c in all_combinations(sweep.values)] == [
        (2, "grain"),
        (0, "device"),
        (4, "grain"),
    ]


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("batch_sizes", "", "--batch_sizes = "),
        ("batch_sizes", "8,1", "'1' is not an integer >= 2"),
        ("num_workers", "two", "--num_workers = two: 'two' is not an integer >= 0"),
        ("grad_accum", "0", "'0' is not an integer >= 1"),
        ("precisions", "float16", "--precisions = float16: 'float16' is not one of float32, bfloat16"),
        ("pipelines", "grain,", "--pipelines = grain,: '' is not one of grain, device"),
    ],
)
def test_values_that_cannot_be_are_refused_by_flag(flag, text, words):
    with pytest.raises(UserError) as error:
        grid_values(tiny_config(), {flag: text})
    assert words in str(error.value)


@pytest.mark.parametrize("path", sorted((ROOT / "profiling" / "sweeps").glob("*.toml")), ids=lambda path: path.stem)
def test_study_files_have_as_many_combinations_as_they_say(path):
    entries = tomllib.loads(path.read_text())
    texts = {flag: ",".join(map(str, entries[flag])) for flag in FLAGS if flag in entries}
    combinations = all_combinations(grid_values(load_config(entries["config"]), texts))
    assert f"{len(combinations)} combinations" in path.read_text()


def test_a_row_is_what_its_repeats_say_together():
    row = SweepRow(Combination(8, 0, 1, "float32", "none", "grain"))
    assert row.status == "pending" and row.samples_per_sec is None and row.leak is False
    row = row.with_repeat(ok(100.0, process_memory_bytes=5))
    assert row.samples_per_sec == pytest.approx(100) and row.samples_per_sec_ci95 is None
    row = row.with_repeat(in_round(1, ok(400.0, compile_cached=True, compile_seconds=0.1, notes=("hm",))))
    (values,) = rows_to_json([row])
    assert values["samples_per_sec"] == pytest.approx(200)  # the geometric mean
    low, high = values["samples_per_sec_ci95"]
    assert low < 100 < 400 < high and low * high == pytest.approx(200**2)
    assert values["batches_per_sec"] == pytest.approx(25) and values["avg_step_time"] == pytest.approx(1 / 25)
    assert values["samples_processed"] == 160 and values["elapsed_seconds"] == pytest.approx(1.0)
    assert values["compile_seconds"] == 3.0 and values["process_memory_bytes"] == 10**9 and values["notes"] == ["hm"]
    row = row.with_repeat(TrialResult("crashed", "killed by SIGSEGV", round=2))
    assert (row.status, row.reason) == ("crashed", "repeat 3: killed by SIGSEGV")
    assert row.samples_per_sec == pytest.approx(200)  # what was measured stays
    assert SweepRow.from_dict(json.loads(json.dumps(row.to_dict()))) == row


def test_a_program_compiled_for_another_row_took_as_long_there():
    first, second = (SweepRow(Combination(8, workers, 1, "float32", "none", "grain")) for workers in (0, 1))
    rows = [
        first.with_repeat(ok(1.0, compile_seconds=7.0)),
        second.with_repeat(ok(1.0, compile_seconds=0.1, compile_cached=True)),
    ]
    assert [row["compile_seconds"] for row in rows_to_json(rows)] == [7.0, 7.0]


def test_larger_batches_than_one_that_ran_out_of_memory_are_skipped_all_else_equal(make, trials):
    sweep = make(batch_sizes="8,16,32", grad_accum="1,2")
    trials.ends["002_round0"] = TrialResult("out_of_memory", "RESOURCE_EXHAUSTED")  # 16 in one part
    rows = run_sweep(sweep, time_limit=1, resume=False)[1]["rows"]
    assert [row["status"] for row in rows] == ["ok", "ok", "out_of_memory", "ok", "skipped", "ok"]
    assert "batch 16, 0 workers" in rows[4]["reason"]
    assert trials.run.count((16, 1)) == 1 and (32, 1) not in trials.run and trials.run.count((32, 2)) == 2
    kept = [SweepRow.from_dict(row) for row in rows]
    assert skip_larger(kept, 0) == kept  # the first did not run out


@pytest.mark.parametrize(
    ("stop", "code"),
    [(KeyboardInterrupt(), EXIT_INTERRUPTED), (Interrupted(signal.SIGTERM), EXIT_TERMINATED)],
)
def test_an_interruption_loses_nothing_and_resume_measures_nothing_twice(make, trials, stop, code):
    sweep = make(batch_sizes="8,16,32")
    trials.ends["000_round1"] = stop  # the last of the second round, which starts with the second trial
    assert run_sweep(sweep, time_limit=1, resume=False)[0] == code
    kept = json.loads(sweep.output.read_text())
    assert [len(row["repeats"]) for row in kept["rows"]] == [1, 2, 2]
    SCHEMA.validate(kept)
    with pytest.raises(UserError, match="continue it with --resume, or choose another --output_json"):
        load_document(sweep, resume=False)
    trials.ends.clear()
    trials.run.clear()
    exit_code, document = run_sweep(sweep, time_limit=1, resume=True)
    assert exit_code == 0 and trials.run == [(8, 1)] and document["conclusion"]["best"]["batch_size"] == 32
    again = json.loads(sweep.output.read_text())
    assert again["rows"][1:] == kept["rows"][1:] and again["header"] == kept["header"]


def kill_in_first_trial(sweep, result):
    """Leaves what a killed sweep leaves if its first trial ends afterwards."""
    sweep.experiment.save(make_document(*load_document(sweep, resume=False)))
    folder = sweep.experiment.folder / "000_round0"
    folder.mkdir(parents=True)
    write_json(folder / "request.json", sweep.request(all_combinations(sweep.values)[0]).to_dict())
    write_json(folder / "result.json", result.to_dict())


def test_a_trial_that_ended_after_its_sweep_was_killed_is_not_measured_again(make, trials):
    sweep = make(batch_sizes="8,16", repeats=1)
    kill_in_first_trial(sweep, ok(777.0))
    rows = run_sweep(sweep, time_limit=1, resume=True)[1]["rows"]
    assert trials.run == [(16, 1)] and rows[0]["samples_per_sec"] == pytest.approx(777)
    sweep.output.unlink()  # a new sweep takes nothing from there
    run_sweep(sweep, time_limit=1, resume=False)
    assert trials.run == [(16, 1), (8, 1), (16, 1)]


def test_one_that_failed_after_its_sweep_was_killed_is_measured_again(make, trials):
    sweep = make(batch_sizes="8", repeats=1)
    kill_in_first_trial(sweep, TrialResult("out_of_memory", "bad_alloc"))
    rows = run_sweep(sweep, time_limit=1, resume=True)[1]["rows"]
    assert trials.run == [(8, 1)] and rows[0]["status"] == "ok"


def test_failures_are_measured_again_when_asked_for(make, trials):
    sweep = make(batch_sizes="8,16,32")
    trials.ends |= {"000_round1": TrialResult("crashed", "x"), "001_round0": TrialResult("out_of_memory", "y")}
    code, document = run_sweep(sweep, time_limit=1, resume=False)
    assert summarise(sweep, document, code)["skipped"] == 1
    trials.ends.clear()
    trials.run.clear()
    run_sweep(sweep, time_limit=1, resume=True)
    assert trials.run == []  # without being asked to, nothing is tried again
    rows = run_sweep(sweep, time_limit=1, resume=False, retry_failed=True)[1]["rows"]
    assert sorted(trials.run) == [(8, 1), (16, 1), (16, 1), (32, 1), (32, 1)]
    assert all([repeat["round"] for repeat in row["repeats"]] == [0, 1] and not row["reason"] for row in rows)
    assert [row["status"] for row in rows] == ["ok"] * 3


def test_a_batch_to_keep_that_is_not_swept_is_refused_before_the_first_trial(make, trials):
    with pytest.raises(UserError, match="--fixed_effective_batch = 64: not among --batch_sizes = 8,16; .*accumulation"):
        run_sweep(make(batch_sizes="8,16"), time_limit=1, resume=False, fixed_batch=64)
    assert trials.run == []


def test_the_header_has_the_memory_of_the_gpu(make, monkeypatch):
    assert make().header()["memory_limit_bytes"] is None
    gpu = {"gpu_name": "A GPU", "gpu_memory_bytes": 8 * 2**30}
    monkeypatch.setattr(sweep_module, "describe_hardware", lambda index: gpu)
    assert make().header()["memory_limit_bytes"] == 8 * 2**30


def test_data_that_is_not_there_is_said_once_and_not_asked_for_again(make, trials):
    absent = tiny_config(data__source="cifar10", data__dir="nowhere", data__image_size=32)
    sweep = dataclasses.replace(make(absent, batch_sizes="8,16", repeats=1), use_dummy_data=False)
    with pytest.raises(UserError, match="nowhere"):
        run_sweep(sweep, time_limit=1, resume=False)
    assert trials.run == []
    whole = dataclasses.replace(make(batch_sizes="8", repeats=1), use_dummy_data=False)
    run_sweep(whole, time_limit=1, resume=False)
    measured = list(trials.run)
    run_sweep(whole, time_limit=1, resume=True)  # nothing is left to measure
    assert trials.run == measured


def test_other_settings_are_refused_by_name(make, trials):
    sweep = make(batch_sizes="8", repeats=1)
    run_sweep(sweep, time_limit=1, resume=False)
    for other, words in (
        (make(batch_sizes="8,16", repeats=1), "--batch_sizes: 8 -> 8,16"),
        (make(batch_sizes="8", repeats=3), "--repeats: 1 -> 3"),
        (dataclasses.replace(sweep, max_batches=5), "--max_batches: 32 -> 5"),
        (make(tiny_config(optim__lr=0.5), batch_sizes="8", repeats=1), "config.optim.lr"),
    ):
        with pytest.raises(UserError, match=words):
            load_document(other, resume=True)
    # Settings of earlier versions that there are no longer do not matter.
    document = json.loads(sweep.output.read_text())
    document["header"]["settings"] |= {"address_space_gb": None, "inject_faults": ""}
    sweep.output.write_text(json.dumps(document))
    assert load_document(sweep, resume=True)[1][0].status == "ok"


def test_only_one_sweep_writes_a_file(make, trials):
    sweep = make(batch_sizes="8")
    sweep.experiment.folder.mkdir()
    with processes.only_one(sweep.experiment.folder / ".lock", "held"):
        with pytest.raises(UserError, match="another sweep is running there"):
            run_sweep(sweep, time_limit=1, resume=True)


def test_a_recorded_sweep_of_an_earlier_version_is_read():
    document = json.loads((ROOT / "profiling" / "results" / "cpu.json").read_text())
    rows = rows_to_json([SweepRow.from_dict(row) for row in document["rows"]])
    assert [row["samples_per_sec"] for row in rows] == [row["samples_per_sec"] for row in document["rows"]]
    for row in document["rows"]:
        row["combination"] = {"prefetch": 2, "worker_threads": 1} | row["combination"]
    assert json.loads(json.dumps(rows)) == document["rows"]


@pytest.fixture
def real(make, monkeypatch):
    """A sweep of real processes, of which the second crashes; programs come from the cache of tests."""
    monkeypatch.delenv("XLA_FLAGS")  # one device
    monkeypatch.setattr(trial, "CACHE", os.environ["JAX_COMPILATION_CACHE_DIR"])
    monkeypatch.setattr(trial, "TRIAL_COMMAND", (sys.executable, str(ROOT / "profiling" / "faulty_sweep.py")))
    monkeypatch.setenv("JEPA_JAX_FAULTS", "1:crash")
    return dataclasses.replace(make(grad_accum="1,3", pipelines="grain,device", repeats=1), max_batches=4)


@pytest.mark.slow
def test_real_trials_make_a_file_as_the_schema_says(real):
    code, _ = run_sweep(real, time_limit=1200, resume=False)
    document = json.loads(real.output.read_text())
    assert code == 0
    SCHEMA.validate(document)
    rows = document["rows"]
    assert [row["status"] for row in rows] == ["ok", "crashed", "refused", "refused"]
    assert "SIGABRT" in rows[1]["reason"] and "not divisible" in rows[2]["reason"]
    assert rows[0]["samples_per_sec"] > 0 and rows[0]["data_source"] == "dummy" and not rows[0]["leak"]
    assert document["header"]["versions"]["jax"] and document["header"]["hardware"]["gpu_name"] is None
    result = summarise(real, document, code)
    assert result["best"] == rows[0]["combination"] and (result["ok"], result["trials"]) == (1, 4)
    document["rows"][0]["status"] = "fine"
    del document["rows"][1]["mfu"]
    assert len(list(SCHEMA.iter_errors(document))) == 2  # the check can fail


def test_the_command_ends_with_an_object_and_an_exit_code(tmp_path, capsys):
    output = tmp_path / "new" / "sweep.json"
    flags = [f"--config={ROOT / 'tests' / 'tiny_config.py'}", "--grad_accum=3", f"--output_json={output}"]
    assert SWEEP.main(flags) == 1  # nothing was measured
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["refused"] == 1 and last["best"] is None
    SCHEMA.validate(json.loads(output.read_text()))
    assert output.with_suffix(".html").exists() and "16" in output.with_suffix(".md").read_text()
    assert SWEEP.main(flags) == 2
    assert "holds a sweep already; continue it with --resume" in capsys.readouterr().err
