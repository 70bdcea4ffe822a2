"""The profiler in a loop that is not ours: `docs/examples/profile_own_loop.py` as an outside module."""

import importlib
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jepa_jax
from jepa_jax.base.errors import UserError

EXAMPLE = pathlib.Path(__file__).parents[2] / "docs" / "examples" / "profile_own_loop.py"


def test_the_example_has_a_profile_a_page_and_a_trace(tmp_path, monkeypatch, capsys):
    shutil.copy(EXAMPLE, tmp_path / "profile_own_loop.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        importlib.import_module("profile_own_loop").main(tmp_path / "profile")
    finally:
        sys.modules.pop("profile_own_loop", None)
    said = capsys.readouterr().out
    assert "time of epoch 3: " in said and "waiting for data" in said and "data.num_workers" not in said
    profile = json.loads((tmp_path / "profile" / "profile.json").read_text())
    assert [epoch["steps"] for epoch in profile["epochs"]] == [40, 40, 40]
    for epoch in profile["epochs"]:
        assert sum(epoch["sections"].values()) == pytest.approx(epoch["seconds"])
        assert epoch["sections"]["data_wait"] > 0 and epoch["sections"]["forward_pass"] > 0
    scopes = {(row["scope"], row["phase"]) for row in profile["device"]["scopes"]}
    assert {("encoder", "forward"), ("encoder", "backward"), ("head", "backward"), ("optimizer", "optimizer")} <= scopes
    page = (tmp_path / "profile" / "profile.html").read_text()
    assert "Time by epoch" in page and "Device time by scope" in page
    assert list((tmp_path / "profile" / "trace").rglob("*.xplane.pb"))


def test_nothing_of_models_data_or_methods_is_imported():
    code = (
        "import sys, jepa_jax.profiling.own_loop, jepa_jax.reports.profile_section\n"
        "print(' '.join({name.split('.')[1] for name in sys.modules if name.startswith('jepa_jax.')}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"base", "config", "runtime", "compiled", "profiling", "reports"}


def test_a_batch_of_another_shape_is_compiled_and_counted(tmp_path):
    step = jax.jit(lambda state, batch: (state + 1, batch["x"].sum()))
    with jepa_jax.profile_loop(step, tmp_path, batch_size=2, steps_per_epoch=2) as profiler:
        state = jnp.zeros([])
        for size in profiler.batches([2, 2, 3]):
            state, total = profiler.step(state, {"x": jnp.ones(size)})
            assert total == size
    assert state == 3 and "time of epoch 2" in profiler.summary()
    epochs = json.loads((tmp_path / "profile.json").read_text())["epochs"]
    assert [(epoch["steps"], epoch["compilations"]) for epoch in epochs] == [(2, 0), (1, 1)]


def test_what_cannot_be_profiled_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"not a compiled function; give jax.jit\(step\)"):
        jepa_jax.profile_loop(lambda state, batch: state, tmp_path, batch_size=1)
    step = jax.jit(lambda state, batch: (state, batch))
    with pytest.raises(UserError, match="trace_steps = '3': write the first and the last step as A:B"):
        jepa_jax.profile_loop(step, tmp_path, batch_size=1, trace_steps="3")
    with jepa_jax.profile_loop(step, tmp_path, batch_size=1) as profiler:
        with pytest.raises(UserError, match=r"section\('lunch'\): unknown; choose from .*validation"):
            profiler.section("lunch")
