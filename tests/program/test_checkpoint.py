"""Checkpoints: what comes back is what was saved, and a wrong one is refused."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.program.checkpoint import Checkpoints, params_sha256
from jepa_jax.program.step import TrainState


def make_state(width=3, step=0):
    params = {"model": {"layers": {0: {"kernel": jnp.full((2, width), step + 0.5)}}}, "probe": {"bias": jnp.ones(4)}}
    return TrainState(
        jnp.int32(step),
        jnp.zeros(2, jnp.uint32),
        params,
        {"norm": {"mean": jnp.zeros(width)}},
        (jnp.int32(7), {"m": params}),
        {"layers": {0: {"kernel": jnp.full((2, width), step + 0.25)}}},
        {"norm": {"mean": jnp.full(width, step + 0.125)}},
    )


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def test_the_newest_state_comes_back_bit_for_bit_in_a_new_process_like_manager(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step=step), {"step": step, "note": "x"})
        checkpoints.wait()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step() == 3
        assert checkpoints.shape("params/probe/bias") == (4,) and checkpoints.shape("params/other") is None
        state, progress = checkpoints.restore(abstract(make_state()))
    assert progress == {"step": 3, "note": "x"}
    assert jax.tree.structure(state) == jax.tree.structure(make_state())
    jax.tree.map(np.testing.assert_array_equal, state, make_state(step=3))
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["step_2", "step_3"]


def test_another_architecture_is_named(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(width=3), {"step": 1})
        checkpoints.wait()
        with pytest.raises(UserError, match=r"another architecture.*kernel is \(2, 3\) there and \(2, 5\)"):
            checkpoints.restore(abstract(make_state(width=5)))


def test_a_checkpoint_that_was_cut_off_does_not_count_and_is_removed(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(step=1), {"step": 1})
        checkpoints.wait()
    (tmp_path / "step_2.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1
    assert not (tmp_path / "step_2.orbax-checkpoint-tmp").exists()


def test_a_limit_on_the_size_of_files_is_named(tmp_path):
    program = """
import resource, sys, pathlib
import jax
from jepa_jax.program.checkpoint import Checkpoints
from jepa_jax.base.errors import UserError
from tests.program.test_checkpoint import make_state
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = pathlib.Path(sys.argv[1])
try:
    with Checkpoints(folder) as checkpoints:
        state = make_state()
        state.params["noise"] = jax.random.normal(jax.random.key(0), (200_000,))  # cannot be compressed
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        checkpoints.save(1, state, {"step": 1})
        checkpoints.wait()
except UserError as error:
    print(error)
    sys.exit(0 if "larger than `ulimit -f`" in str(error) and not list(folder.glob("*tmp*")) else 1)
sys.exit(1)
"""
    root = pathlib.Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_digest_sees_one_bit_and_not_the_layout_in_memory():
    a = {"w": jnp.arange(6.0).reshape(2, 3)}
    b = {"w": jnp.asarray(np.asfortranarray(np.arange(6.0, dtype=np.float32).reshape(2, 3)))}
    c = {"w": jnp.arange(6.0).reshape(2, 3).at[0, 0].set(1e-45)}
    assert params_sha256(a) == params_sha256(b) != params_sha256(c)
