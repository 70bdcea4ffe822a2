import jax.numpy as jnp
import numpy as np
from flax import nnx

from jepa_jax.projects.world_models.networks.frame_mlp import FrameMlp
from tests.arrays import create


def test_a_pixel_changes_what_is_seen_of_its_row_and_its_column_alone() -> None:
    model = create(lambda: FrameMlp(5, 2, (4,), strips=3, rngs=nnx.Rngs(params=0)))
    model.layers = nnx.List([])
    blank = jnp.zeros((1, 5, 5, 2))
    seen = model(blank.at[0, 1, 3, 1].set(1.0)) - model(blank)
    rows, columns = np.asarray(seen).reshape(2, 5, 2, 3)  # strip, channel, number
    assert set(zip(*np.nonzero(rows.any(-1)), strict=True)) == {(1, 1)}
    assert set(zip(*np.nonzero(columns.any(-1)), strict=True)) == {(3, 1)}
    assert rows.min() >= 0 and columns.min() >= 0
