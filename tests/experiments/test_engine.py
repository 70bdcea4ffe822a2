"""The engine of studies, sweeps and searches: time left, locks, resuming, and how a signal ends it."""

import json
import signal
import sys

import pytest

from jepa_jax.base import processes
from jepa_jax.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, UserError
from jepa_jax.experiments.engine import Experiment, TaskProgress


@pytest.fixture
def experiment(tmp_path):
    return Experiment("sweep", "--out", tmp_path / "out", results=tmp_path / "out" / "x.json", folder=tmp_path / "out")


def load(experiment, header, resume=True):
    def differences(there, here):
        return [f"{key}: {there.get(key)} -> {here[key]}" for key in here if there.get(key) != here[key]]

    return experiment.load(header, lambda document: document["rows"], differences, resume=resume)


def test_a_document_is_continued_only_by_the_same_experiment(experiment):
    assert load(experiment, {"a": 1}) is None
    experiment.results.parent.mkdir()
    experiment.save({"header": {"a": 1}, "rows": [7]})
    assert load(experiment, {"a": 1}) == [7]
    with pytest.raises(UserError, match="holds a sweep already; continue it with --resume, or choose another --out"):
        load(experiment, {"a": 1}, resume=False)
    with pytest.raises(UserError, match=r"--out = .*with other settings \(a: 1 -> 2; b: None -> 3\)"):
        load(experiment, {"a": 2, "b": 3})
    for content in ("{", "[]", "{}", json.dumps({"header": {"a": 1}})):
        experiment.results.write_text(content)
        with pytest.raises(UserError, match="does not hold the results of a sweep"):
            load(experiment, {"a": 1})


@pytest.fixture
def ctrl_c():
    """Ctrl-C as usual, even if a shell started the tests in the background and made them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


STOPPABLE = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: (pathlib.Path(sys.argv[1]).write_text("stopped"), sys.exit()))
pathlib.Path(sys.argv[1]).write_text("ready")
time.sleep(600)
"""


@pytest.mark.parametrize("number, code", [(signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, EXIT_TERMINATED)])
def test_a_signal_stops_the_task_and_becomes_an_exit_code(experiment, tmp_path, ctrl_c, number, code):
    said = tmp_path / "said"

    def raise_when_ready():
        if said.exists() and said.read_text() == "ready":
            signal.raise_signal(number)

    def work():
        command = [sys.executable, "-c", STOPPABLE, str(said)]
        processes.run(command, experiment.folder / "a", grace=600.0, on_tick=raise_when_ready)
        pytest.fail("the signal should have ended the task")

    assert experiment.execute(work, TaskProgress(1, "tasks"), grace=600.0) == code
    assert said.read_text() == "stopped"
    assert experiment.execute(lambda: None, TaskProgress(1, "tasks"), grace=1.0) == EXIT_OK  # the lock is free


def test_only_one_at_a_time(experiment):
    def work():
        with pytest.raises(UserError, match="another sweep is running there"):
            experiment.execute(lambda: None, TaskProgress(1, "tasks"), grace=1.0)

    assert experiment.execute(work, TaskProgress(1, "tasks"), grace=1.0) == EXIT_OK


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "out"
    experiment = Experiment("study", "--out", place, results=place / "x.json", folder=place)
    with pytest.raises(UserError, match="file/out: cannot write"):
        experiment.execute(lambda: None, TaskProgress(1, "tasks"), grace=1.0)
