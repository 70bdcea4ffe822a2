"""Runs on data that is given as Python objects, or by a function of the user's own: they resume bit for bit."""

import functools

import pytest

import jepa_jax
from jepa_jax.base.errors import UserError
from jepa_jax.program.workdir import Workdir
from tests.data.foreign import KINDS, LIBRARIES
from tests.programs import shared_programs
from tests.runs import Killed, KillNine, Silent, rows
from tests.tiny import tiny_config

SHORT = dict(mesh__data=1, eval__every_epochs=0, eval__knn_every_epochs=0)


def train(workdir, console=None, data=None, **overrides):
    with shared_programs():
        return jepa_jax.train(tiny_config(**SHORT, **overrides), workdir, data=data, console=console or Silent())


def losses(workdir):
    """Returns the loss of each step, as it was last recorded."""
    return {row["step"]: row["train/loss"] for row in rows(workdir) if "train/loss" in row}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a function that gives losses and weights of an uninterrupted run on one kind of data."""

    @functools.cache
    def run(kind):
        workdir = tmp_path_factory.mktemp(kind)
        summary = train(workdir, data={split: KINDS[kind](split) for split in ("train", "test")})
        return losses(workdir), summary["params_sha256"]

    return run


FAST = ("torch",)


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_every_kind_of_data_trains_resumes_after_a_kill_and_is_asked_for_again(whole, tmp_path, kind):
    data = {split: KINDS[kind](split) for split in ("train", "test")}
    with pytest.raises(KillNine):
        train(tmp_path, Killed(8), data)
    assert Workdir(tmp_path).has_checkpoint()
    with pytest.raises(UserError, match="data.source = python: this data was given to jepa_jax.train"):
        train(tmp_path, data__source="python")
    console = Silent()
    workers = 1 if kind == "stream" else 0  # a number that may change
    summary = train(tmp_path, console, data, data__num_workers=workers)
    assert any(line.startswith("resumed at step") for line in console.lines)
    assert (losses(tmp_path), summary["params_sha256"]) == whole("stream" if kind == "stream" else "arrays")
    assert summary["probe_accuracy"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_data_sets_of_libraries_resume_after_a_kill(tmp_path, library):
    pytest.importorskip(library)
    data = LIBRARIES[library](tmp_path)
    whole = train(tmp_path / "whole", data=data)
    with pytest.raises(KillNine):
        train(tmp_path / "cut", Killed(8), data)
    assert train(tmp_path / "cut", data=data)["params_sha256"] == whole["params_sha256"]
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_function_of_the_config_gives_the_same_run(whole, tmp_path):
    summary = train(tmp_path, data__source="tests.data.foreign:map_dataset")
    assert (losses(tmp_path), summary["params_sha256"]) == whole("arrays")
