"""The mesh and what has to divide over it."""

from types import SimpleNamespace

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.runtime.mesh import check_batch, make_mesh


def config(batch_size, accum_steps=1, eval_batch_size=16):
    return SimpleNamespace(
        data=SimpleNamespace(batch_size=batch_size),
        train=SimpleNamespace(accum_steps=accum_steps),
        eval=SimpleNamespace(batch_size=eval_batch_size),
    )


def test_batches_must_divide_over_the_devices():
    mesh = make_mesh(8, 1)
    check_batch(config(32, accum_steps=2), mesh)
    for wrong, message in (
        (config(20), "config.data.batch_size = 20 .* 8 devices; use a multiple of 8"),
        (config(24, accum_steps=2), "config.data.batch_size = 24 in 2 accumulation steps: .* use a multiple of 16"),
        (config(16, eval_batch_size=20), "config.eval.batch_size = 20: not divisible by 8 devices"),
    ):
        with pytest.raises(UserError, match=message):
            check_batch(wrong, mesh)
