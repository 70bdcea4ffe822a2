"""A schedule-free run: what is evaluated, exported and hashed is the average, and a restart ends with the same bits."""

import os
import signal

import jax
import numpy as np
import pytest

from jepa_jax import load_encoder
from jepa_jax.base.signals import Interrupted
from jepa_jax.evals.inference import load_run
from jepa_jax.program.checkpoint import params_sha256
from jepa_jax.program.optim import averaged_params
from jepa_jax.program.restore import restore_state
from jepa_jax.runtime.mesh import make_mesh
from tests.runs import Silent, run
from tests.tiny import tiny_config

OPTIM = dict(optim__name="schedule_free_adamw", optim__lr=1e-2)


def stop_after_first_epoch(text):
    if text.startswith("epoch 1/2"):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_the_average_is_what_a_run_is_judged_by_and_a_restart_is_exact(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    summary = run(whole, **OPTIM)
    with pytest.raises(Interrupted):
        run(cut, Silent(stop_after_first_epoch), **OPTIM)
    resumed = run(cut, resume="must", **OPTIM)
    same = ("status", "steps", "params_sha256", "probe_accuracy", "knn_accuracy")
    assert [resumed[name] for name in same] == [summary[name] for name in same]

    _, state = restore_state(tiny_config(mesh__data=1, **OPTIM), whole, make_mesh(1, 1))
    average = averaged_params(state.params["model"], state.opt_state)
    gaps = jax.tree.map(lambda x, y: np.abs(x - y).max(), average["encoder"], state.params["model"]["encoder"])
    assert max(jax.tree.leaves(gaps)) > 1e-4  # the average is not the place of the last gradient
    for params in (load_encoder(whole).params, load_run(whole).encoder.params):
        jax.tree.map(np.testing.assert_array_equal, params, average)
    assert summary["params_sha256"] == params_sha256(average)
