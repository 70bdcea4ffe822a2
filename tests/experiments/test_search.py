"""The search on machines that are formulas: it finds their optimum with few trials and keeps every limit."""

import dataclasses
import io
import itertools
import json
import math

import numpy as np
import pytest

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.experiments import tuned_file
from jepa_jax.experiments.rows import TrialFigures, TrialResult
from jepa_jax.experiments.search import Search
from jepa_jax.experiments.search_space import SearchSpace, make_space, worker_counts
from jepa_jax.experiments.search_trials import SearchLimits, SearchTrial, program_of
from jepa_jax.experiments.settings import Combination, TrialRequest
from jepa_jax.experiments.tune import TuneOptions, parse_budget, tune
from jepa_jax.runtime import provenance
from tests.tiny import tiny_config, tiny_masked_config

GIB = 2**30
SPACE = SearchSpace((0, 2, 4, 8), ("float32", "bfloat16"), ("none", "full"), ("grain", "device"))
BATCHES = (32, 64, 128, 256, 512, 1024, 2048)
# What a full sweep would measure.
GRID = [
    Combination(*values)
    for values in itertools.product(
        BATCHES, SPACE.num_workers, (1,), SPACE.precisions, SPACE.remats, SPACE.pipelines
    )
]  # fmt: skip


@dataclasses.dataclass
class Machine:
    """Speed and memory in closed form, with noise, a memory that ends, and a clock that trials advance."""

    memory: float = 24 * GIB
    noise: float = 0.015
    loader: float = 1e9  # images a second of one worker
    half: float = 200.0  # images at which a step is half as fast as it can be
    bfloat16: float = 1.8  # times as fast as float32
    evaluation_memory: float = 1.0  # times that of training
    seconds: float = 8.0  # of a trial
    compiling: float = 15.0  # of a program that was not compiled before
    pool: float | None = None  # what the device's allocator says that it has
    diverging: tuple = ()  # values of knobs with which the loss is not finite
    faults: dict = dataclasses.field(default_factory=dict)  # knob's value -> status
    seed: int = 0

    def __post_init__(self):
        self.now, self.requests, self.rng = 0.0, [], np.random.default_rng(self.seed)
        self.programs = set()

    def compute(self, c: Combination) -> float:
        part = c.batch_size / c.grad_accum_steps
        speed = 4000 * part / (part + self.half) * (self.bfloat16 if c.precision == "bfloat16" else 1.0)
        return speed * (0.78 if c.remat == "full" else 1.0)

    def speed(self, c: Combination) -> float:
        load = math.inf if c.pipeline == "device" else self.loader * max(1, c.num_workers * c.worker_threads)
        return min(self.compute(c), load)

    def bytes(self, c: Combination) -> float:
        kept = (1.0 if c.precision == "bfloat16" else 1.8) * (0.4 if c.remat == "full" else 1.0)
        return GIB * (1 + 0.01 * kept * c.batch_size / c.grad_accum_steps)

    def best(self, limit=0.92) -> Combination:
        return max((c for c in GRID if self.bytes(c) <= limit * self.memory), key=self.speed)

    def __call__(self, request, time_limit):
        c = request.combination
        self.requests.append(request)
        cached = program_of(c) in self.programs
        self.programs.add(program_of(c))
        self.now += self.seconds + (0.0 if cached else self.compiling)
        status = next((self.faults[value] for value in c.to_dict().values() if value in self.faults), "ok")
        if status == "timed_out":
            self.now += time_limit - self.seconds - self.compiling
        memory = self.bytes(c) * (self.evaluation_memory if request.with_evaluation else 1.0)
        if memory > self.memory:
            status = "out_of_memory"
        if status != "ok":
            return TrialResult(status, f"a {status} machine")
        speed = self.speed(c) * float(np.exp(self.noise * self.rng.normal()))
        figures = TrialFigures(
            samples_per_sec=speed,
            peak_memory_bytes=memory,
            device_limit_bytes=self.pool,
            finite=not set(c.to_dict().values()) & set(self.diverging),
            data_wait_fraction=1 - self.speed(c) / self.compute(c),
            data_source="formula",
            compile_seconds=self.compiling,
            compile_cached=cached,
            program_fingerprint=f"{c.batch_size} {c.precision} {c.remat}",
        )
        return TrialResult("ok", figures=figures)


def request_of(config):
    return TrialRequest(config.to_dict(), Combination.of(config))


def search_on(machine, *, budget=1e6, space=SPACE, margin=0.08, recorded=(), batch=128, limits=None, **config):
    given = tiny_config(data__batch_size=batch, **config)
    limits = limits or SearchLimits(budget, machine.memory, margin)
    search = Search(request_of(given), space, limits, machine, recorded=recorded, clock=lambda: machine.now)
    search.search()
    return search, search


# A step that needs large batches; one that is fast at any; one that waits for data; a card for float32 alone.
MACHINES = {
    "large batches": {"half": 300.0},
    "flat": {"half": 4.0},
    "slow loader": {"loader": 900.0},
    "slow bfloat16": {"bfloat16": 0.3, "half": 40.0},
    "little memory": {"memory": 4 * GIB},
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("seed", range(2))
def test_finds_the_optimum_with_a_third_of_the_grids_trials(name, seed):
    machine = Machine(seed=seed, **MACHINES[name])
    search, outcome = search_on(machine)
    assert machine.speed(outcome.chosen) > 0.95 * machine.speed(machine.best())
    assert len(machine.requests) <= len(GRID) / 3
    assert outcome.confirmed and machine.requests[0].combination == search.reference


@pytest.mark.parametrize("memory", [3, 7, 13, 24])
def test_the_choice_keeps_the_margin_and_batches_between_powers_use_the_memory(memory):
    machine = Machine(memory=memory * GIB, half=2000.0)
    _, outcome = search_on(machine)
    used = machine.bytes(outcome.chosen) / machine.memory
    assert used <= 0.92
    assert used > 0.65  # the batch was bisected, not left at the last power that fits


def test_trials_stay_below_the_memory_that_there_is():
    machine = Machine(memory=5 * GIB, half=2000.0)
    search_on(machine)
    # By the second point of the line on, larger batches are known to fit or not to.
    too_large = [r for r in machine.requests if machine.bytes(r.combination) > machine.memory]
    assert not too_large


def test_an_evaluation_that_needs_more_memory_than_training_makes_the_choice_give_way():
    machine = Machine(memory=8 * GIB, half=2000.0, evaluation_memory=1.15)
    _, outcome = search_on(machine)
    assert machine.bytes(outcome.chosen) * 1.15 <= 0.92 * machine.memory
    assert outcome.confirmed and "failed the longer run" in " ".join(outcome.notes)


@pytest.mark.parametrize("status", ["out_of_memory", "crashed", "timed_out", "refused"])
def test_settings_that_fail_are_survived_and_left(status):
    machine = Machine(faults={"bfloat16": status, "device": status, 4: status})
    _, outcome = search_on(machine)
    c = outcome.chosen
    assert (c.precision, c.pipeline) == ("float32", "grain") and c.num_workers != 4
    assert machine.speed(c) > 0.9 * max(
        machine.speed(x) for x in GRID if x.precision == "float32" and machine.bytes(x) < 22 * GIB
    )
    tries = sum(r.combination.precision == "bfloat16" for r in machine.requests)
    assert tries <= (2 if status == "out_of_memory" else 1)  # a smaller batch might have fitted


def test_a_config_that_does_not_fit_is_where_the_search_begins_to_shrink():
    machine = Machine(memory=3 * GIB)
    search, outcome = search_on(machine, batch=512)
    assert not search.works(search.reference)
    assert outcome.chosen is not None and machine.bytes(outcome.chosen) <= 0.92 * machine.memory


def test_nothing_works_is_an_outcome_too():
    _, outcome = search_on(Machine(faults={"grain": "crashed", "device": "crashed"}))
    assert outcome.chosen is None and not outcome.confirmed


@pytest.mark.parametrize("budget", [60, 150, 300, 600])
def test_the_budget_is_kept_and_the_choice_still_confirmed(budget):
    machine = Machine()
    search, outcome = search_on(machine, budget=budget)
    assert machine.now <= budget
    assert outcome.chosen is not None and search.works(outcome.chosen)
    assert outcome.confirmed
    if budget < 300:
        assert outcome.untried


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (SearchLimits(1e6, 20 * GIB, is_guess=True), 6),  # the guess is too high
        (SearchLimits(1e6, 2 * GIB, is_guess=True), 6),  # or too low
        (SearchLimits(1e6, 4 * GIB), 4),  # given by the user: less is kept,
        (SearchLimits(1e6, 20 * GIB), 6),  # more is not there
    ],
)
def test_the_limit_is_what_the_first_trial_reads(limits, limit):
    machine = Machine(memory=24 * GIB, pool=6 * GIB, half=2000.0)
    search, outcome = search_on(machine, limits=limits)
    assert search.limits.memory_bytes == limit * GIB
    assert 0.65 * limit * GIB < machine.bytes(outcome.chosen) <= 0.92 * limit * GIB


def test_a_loader_that_limits_is_widened_to_what_its_wait_says():
    machine = Machine(loader=600.0, half=4.0, bfloat16=1.0)  # one worker loads 600 of about 3,900 images per second
    space = dataclasses.replace(SPACE, num_workers=(0, 1), pipelines=("grain",), prefetches=(2, 4), most_workers=16)
    search, outcome = search_on(machine, space=space)
    assert outcome.confirmed and outcome.chosen.num_workers == 7
    wide = [request.combination for request in machine.requests if request.combination.prefetch == 4]
    assert wide and all(search.rows[dataclasses.replace(c, prefetch=2)].status == "ok" for c in wide)
    unlimited, _ = search_on(Machine(), space=space)
    assert {c.prefetch for c in unlimited.rows} == {2} and max(c.num_workers for c in unlimited.rows) == 1


def test_workers_that_limit_get_the_threads_that_their_wait_asks_for():
    machine = Machine(loader=600.0, half=4.0, bfloat16=1.0)
    space = dataclasses.replace(SPACE, num_workers=(0, 2), pipelines=("grain",), worker_threads=(1, 2), most_threads=8)
    _, outcome = search_on(machine, space=space, data__num_workers=2)
    assert outcome.confirmed and (outcome.chosen.num_workers, outcome.chosen.worker_threads) == (2, 4)
    idle, _ = search_on(machine, space=dataclasses.replace(space, num_workers=(0,)))
    assert {c.worker_threads for c in idle.rows} == {1}


def test_a_setting_whose_loss_is_not_finite_is_not_chosen():
    machine = Machine(diverging=("bfloat16",))
    search, outcome = search_on(machine)
    assert outcome.confirmed and outcome.chosen.precision == "float32"
    tried = next(request.combination for request in machine.requests if request.combination.precision == "bfloat16")
    assert search.why_not(tried) == "its loss is not finite"


def test_time_of_a_trial_that_ended_with_the_budget_stays_used():
    machine = Machine(faults={"bfloat16": "timed_out"})
    given = request_of(tiny_config(data__batch_size=128))
    search = Search(given, SPACE, SearchLimits(60), machine, clock=lambda: machine.now)
    hanging = dataclasses.replace(search.reference, precision="bfloat16")
    assert search.measure(search.reference) and not search.measure(hanging)
    assert machine.now > 50 and len(search.out_of_time) == 1 and search.untried == [hanging]
    recorded = [SearchTrial.from_dict(trial.to_dict()) for trial in search.all_trials()]
    again = Search(given, SPACE, SearchLimits(600), Machine(), recorded=recorded, clock=lambda: 0.0)
    assert again.seconds_left() == pytest.approx(600 - machine.now)
    assert again.measure(hanging) and again.rows[hanging].status == "ok"  # with more time it is tried again


def test_a_first_trial_that_needs_more_than_the_budget_is_no_failure_and_shrinks_nothing():
    machine = Machine(faults={128: "timed_out"})
    search, outcome = search_on(machine, budget=600)
    assert machine.now <= 600 and outcome.chosen is None and search.rows == {}
    assert {request.combination.batch_size for request in machine.requests} == {128}
    assert "a timed_out machine. --resume with a larger --budget tries it again." in outcome.notes[0]
    assert not any("does not work" in note for note in outcome.notes)
    _, outcome = search_on(Machine(), budget=1800, recorded=search.all_trials())
    assert outcome.confirmed and outcome.chosen is not None


def test_a_batch_that_takes_far_too_long_ends_the_climb_without_a_smaller_one():
    machine = Machine(faults={256: "timed_out"}, half=2000.0)
    search, outcome = search_on(machine)
    assert outcome.confirmed and search.out_of_time[0].combination.batch_size == 256
    assert search.rows[search.out_of_time[0].combination].status == "skipped"  # which no page counts as failed
    assert not {r.combination.batch_size for r in machine.requests} & set(range(129, 256))


def test_if_no_choice_passes_the_longer_run_the_config_stays_unconfirmed():
    machine = Machine(evaluation_memory=100.0)
    search, outcome = search_on(machine)
    assert outcome.chosen == search.reference and not outcome.confirmed
    assert "No choice passed" in " ".join(outcome.notes)


def test_a_fixed_batch_is_kept_and_only_its_parts_change():
    machine = Machine(memory=8 * GIB, half=300.0)
    space = dataclasses.replace(SPACE, fixed_batch=2048)
    _, outcome = search_on(machine, space=space)
    sizes = {request.combination.batch_size for request in machine.requests}
    assert sizes == {2048}
    parts = outcome.chosen.grad_accum_steps
    assert machine.bytes(outcome.chosen) <= 0.92 * machine.memory
    assert machine.bytes(dataclasses.replace(outcome.chosen, grad_accum_steps=parts // 2)) > 0.92 * machine.memory


def test_a_list_of_batches_is_never_left():
    machine = Machine(half=300.0)
    space = dataclasses.replace(SPACE, batch_sizes=(96, 128, 384))
    _, outcome = search_on(machine, space=space)
    assert {r.combination.batch_size for r in machine.requests} <= {96, 128, 384}
    assert outcome.chosen.batch_size == 384


def test_a_search_given_its_own_trials_measures_none_of_them_again():
    machine = Machine()
    search, outcome = search_on(machine)
    again = Machine()
    resumed, second = search_on(again, recorded=search.trials)
    assert again.requests == [] and second.chosen == outcome.chosen
    half = Machine(seed=5)
    rest, _ = search_on(half, recorded=search.trials[:10])
    assert rest.trials[:10] == search.trials[:10]
    assert all(r.combination != search.trials[0].combination or i for i, r in enumerate(half.requests))


class TestCommand:
    """The command around the search: files, resuming, interruption."""

    def setup_method(self):
        self.config = tiny_config(data__batch_size=128)

    def tune(self, folder, run, **options):
        self.said = io.StringIO()
        values = {"num_workers": "0,2", "remats": "none"}
        options = {"budget": "1h", "memory_limit_gb": 24.0} | options
        made = TuneOptions(folder, values=values, config_name="tiny", **options)
        return tune(self.config, made, Console(self.said), run)[:2]

    def test_ends_with_a_file_that_training_takes(self, tmp_path):
        code, result = self.tune(tmp_path, Machine())
        assert code == 0 and result["confirmed"] and result["gain"]["interval"][0] > 1
        found = tuned_file.read_tuned(result["tuned"])
        chosen = Combination.from_dict(result["chosen"])
        config, lines = tuned_file.apply_tuned(self.config, found)
        assert Combination.of(config) == chosen and any("batch also changes" in line for line in lines)
        low, high = found["samples_per_sec_ci95"]
        assert low < Machine().speed(chosen) < high
        assert "linear rule" in " ".join(found["text"])
        document = json.loads((tmp_path / "tune.json").read_text())
        assert document["conclusion"]["best"] == result["chosen"]
        trials = [SearchTrial.from_dict(trial) for trial in document["trials"]]
        assert json.loads(json.dumps([trial.to_dict() for trial in trials])) == document["trials"]

    def test_ctrl_c_keeps_everything_and_resume_goes_on(self, tmp_path):
        machine, left = Machine(), itertools.count()

        def interrupted(request, time_limit):
            if next(left) == 6:
                raise KeyboardInterrupt
            return machine(request, time_limit)

        code, result = self.tune(tmp_path, interrupted)
        assert code == 130 and result["chosen"] and result["tuned"] is None and result["trials"] == 6
        assert not (tmp_path / "tuned.json").exists()
        with pytest.raises(UserError, match="continue it with --resume"):
            self.tune(tmp_path, Machine())
        second = Machine()
        stopped = Machine(seed=3)

        def interrupted_again(request, time_limit):
            if stopped.requests:
                raise KeyboardInterrupt
            return stopped(request, time_limit)

        assert self.tune(tmp_path, interrupted_again, resume=True)[1]["trials"] == 7
        code, resumed = self.tune(tmp_path, second, resume=True)
        assert code == 0 and resumed["trials"] == 7 + len(second.requests)
        assert len(json.loads((tmp_path / "tune.json").read_text())["trials"]) == resumed["trials"]

    def test_another_config_does_not_go_on_in_its_folder(self, tmp_path):
        self.tune(tmp_path, Machine())
        self.config = tiny_config(data__batch_size=64)
        with pytest.raises(UserError, match=r"config\.data\.batch_size: \d+ -> 64"):
            self.tune(tmp_path, Machine(), resume=True)

    def test_another_memory_limit_or_version_does_not_go_on(self, tmp_path, monkeypatch):
        self.tune(tmp_path, Machine())
        with pytest.raises(UserError, match="--memory_limit_gb: 24.0 -> 8.0"):
            self.tune(tmp_path, Machine(), resume=True, memory_limit_gb=8.0)
        monkeypatch.setattr(provenance.metadata, "version", lambda name: "0")
        with pytest.raises(UserError, match=r"jax: \S+ -> 0"):
            self.tune(tmp_path, Machine(), resume=True)

    def test_the_memory_that_is_told_is_the_one_that_counts(self, tmp_path):
        self.tune(tmp_path, Machine(), memory_limit_gb=None)
        header = json.loads((tmp_path / "tune.json").read_text())["header"]
        self.tune(tmp_path, Machine(), resume=True, memory_limit_gb=None)
        told = f"memory: {header['memory_limit_bytes'] / GIB:.1f} GiB may be used, as at the first start"
        assert told in self.said.getvalue()

    def test_another_batch_is_not_the_config_as_given(self, tmp_path):
        _, result = self.tune(tmp_path, Machine(), fixed_effective_batch="2048")
        text = " ".join(json.loads((tmp_path / "tune.json").read_text())["conclusion"]["text"]).lower()
        assert result["chosen"]["batch_size"] == 2048
        assert "the config with its batch made 2,048" in text and "config as given" not in text

    def test_nothing_measured_is_exit_code_1(self, tmp_path):
        code, result = self.tune(tmp_path, Machine(faults={"grain": "crashed"}))
        assert code == 1 and result["chosen"] is None and not (tmp_path / "tuned.json").exists()

    def test_the_config_may_be_the_best_already(self, tmp_path):
        self.config = tiny_config(data__batch_size=64)
        machine = Machine(half=0.0, bfloat16=0.5)
        _, result = self.tune(tmp_path, machine, fixed_effective_batch="config")
        assert result["chosen"] == Combination.of(self.config).to_dict() and result["gain"] is None


@pytest.mark.parametrize("cores, workers", [(1, [0, 1]), (2, [0, 1, 2]), (12, [0, 3, 6, 12]), (64, [0, 16])])
def test_workers_worth_a_try(cores, workers):
    assert worker_counts(cores) == workers


def test_remat_is_tried_only_where_there_is_something_to_recompute():
    assert make_space(tiny_config(), {}).remats == ("none",)
    assert make_space(tiny_masked_config("ijepa"), {}).remats == ("none", "full")


def test_a_set_is_tried_on_the_device_only_if_it_is_small(tmp_path):
    def pipelines(**config):
        data = {"data__dir": str(tmp_path), "data__num_train": 0, **config}
        return make_space(tiny_config(**data), {}, use_dummy_data=True).pipelines

    assert pipelines(data__source="cifar10", data__image_size=32) == ("grain", "device")
    assert pipelines(data__source="tfds:imagenet2012", data__image_size=224) == ("grain",)


@pytest.mark.parametrize("text, seconds", [("90s", 90), ("10m", 600), ("1.5h", 5400), ("45", 45)])
def test_budgets(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "ten", "-5m", "0", "5d"])
def test_budgets_that_are_none(text):
    with pytest.raises(UserError, match="--budget="):
        parse_budget(text)
