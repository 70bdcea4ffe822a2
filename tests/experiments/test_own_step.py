"""Tuning a step of a plain JAX program: `docs/examples/tune_own_step.py` as an outside module, and what is refused."""

import io
import json
import pathlib
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import pytest

import jepa_jax
from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.experiments import tune as tune_module
from jepa_jax.experiments.rows import TrialFigures, TrialResult
from jepa_jax.experiments.settings import Combination, TrialRequest
from jepa_jax.experiments.trial import attempt, run_trial

EXAMPLE = pathlib.Path(__file__).parents[2] / "docs" / "examples" / "tune_own_step.py"
GIVEN = Combination(8, 0, 1, "float32", "", "")


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """The example in a folder of its own, from which this process imports it."""
    shutil.copy(EXAMPLE, tmp_path / "tune_own_step.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("tune_own_step", None)


def request_of(make):
    return TrialRequest({}, GIVEN, max_batches=3, warmup_batches=1, make=make)


@pytest.mark.slow
def test_a_process_imports_and_measures_the_users_step(outside, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # one device
    result = run_trial(outside / "trials" / "0", request_of("tune_own_step:make"), time_limit=1200)
    assert result.status == "ok", result.reason
    figures = result.figures
    assert (figures.measured_batches, figures.samples_processed, figures.finite) == (3, 3 * 8, True)
    assert (figures.platform, figures.discarded_batches) == ("cpu", 3) and figures.process_memory_bytes > 0
    assert TrialRequest.from_dict(json.loads((outside / "trials" / "0" / "request.json").read_text())).make


def test_the_search_returns_the_arguments_of_make_and_writes_the_page(outside, monkeypatch):
    def run(request):
        """Two workers and large batches are fast; bfloat16 runs out of memory."""
        c = request.combination
        if c.precision == "bfloat16":
            return TrialResult("out_of_memory", "RESOURCE_EXHAUSTED")
        speed = 1000.0 * min(c.batch_size, 128) * (1 + (c.num_workers == 2))
        return TrialResult("ok", figures=TrialFigures(speed, process_memory_bytes=10**6, compile_seconds=1.0))

    monkeypatch.setattr(tune_module, "run_trial", lambda folder, request, **options: run(request))
    said = io.StringIO()
    result = jepa_jax.tune_step(
        "tune_own_step:make", batch=64, batch_sizes=(32, 64, 128), precisions=("float32", "bfloat16"), workers=(0, 2),
        budget="1h", output_dir=outside / "out", memory_limit_gb=8.0, console=Console(said),
    )  # fmt: skip
    assert result["chosen"] == {"batch": 128, "precision": "float32", "workers": 2} and result["confirmed"]
    assert result["tuned"] is None and "batch 128, 2 workers, float32" in said.getvalue()
    page = (outside / "out" / "tune.html").read_text()
    assert "Tuning of tune_own_step:make" in page and "out of memory" in page and "remat" not in page
    again = {"output_dir": outside / "out", "resume": True, "console": Console(said), "memory_limit_gb": 8.0}
    with pytest.raises(UserError, match="make: tune_own_step:make -> tests"):
        jepa_jax.tune_step(endless_ones, batch=64, **again)


def endless_ones(batch, precision, workers):
    def batches():
        while True:
            yield jnp.ones(batch)

    return jax.jit(jnp.sum), batches()


def finite_ones(batch, precision, workers):
    return jax.jit(jnp.sum), [jnp.ones(batch)] * 4


def not_a_pair(batch, precision, workers):
    return jax.jit(jnp.sum)


def no_loss(batch, precision, workers):
    return lambda batch: 1.0, endless_ones(batch, precision, workers)[1]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (finite_ones, "the batches of .*:finite_ones ended after 4; repeat them"),
        (not_a_pair, ":not_a_pair returned .*; return a tuple of step and batches"),
        (no_loss, "the step of .*:no_loss returned float; return a scalar jax.Array"),
    ],
)
def test_what_make_does_wrong_is_said_by_name(make, reason):
    result = attempt(request_of(f"{__name__}:{make.__name__}"))
    assert result.status == "refused" and re.search(reason, result.reason)


def test_a_function_that_no_other_process_can_import_is_refused_at_once(tmp_path):
    with pytest.raises(UserError, match="define it at the top of a module"):
        jepa_jax.tune_step(lambda batch, precision, workers: None, batch=8, output_dir=tmp_path)
    with pytest.raises(UserError, match="there is no module nowhere; add its folder to PYTHONPATH"):
        jepa_jax.tune_step("nowhere:make", batch=8, output_dir=tmp_path)
