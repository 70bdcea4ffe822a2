import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.projects.world_models.networks.frame_mlp import FrameMlp
from tests.arrays import create

SIZE, CHANNELS, STRIPS = 5, 2, 3


@pytest.fixture(scope="module")
def strips():
    """Returns a function from an image [5, 5, 2] to its numbers [rows or columns, strip, channel, number]."""
    model = create(lambda: FrameMlp(SIZE, CHANNELS, (4,), strips=STRIPS, rngs=nnx.Rngs(params=0)))
    model.layers = nnx.List([])
    return lambda image: np.asarray(model(image[None])).reshape(2, SIZE, CHANNELS, STRIPS)


def test_a_pixel_one_row_further_changes_the_sum_up_to_this_row_alone(strips) -> None:
    blank = jnp.zeros((SIZE, SIZE, CHANNELS))
    changed = np.abs(strips(blank.at[1, 3, 1].set(1.0)) - strips(blank.at[2, 3, 1].set(1.0))) > 1e-4
    rows, columns = changed.any(-1)  # [strip, channel]
    assert set(zip(*np.nonzero(rows), strict=True)) == {(1, 1)}
    assert set(np.nonzero(columns)[1]) <= {1}  # of the weights of a column, which begin nearly equal


def test_what_all_rows_have_alike_does_not_change_their_numbers(strips) -> None:
    image = jnp.zeros((SIZE, SIZE, CHANNELS)).at[3, 1, 0].set(1.0)
    wider = image.at[:, 4, 0].add(1.0)
    np.testing.assert_allclose(strips(wider)[0], strips(image)[0], atol=1e-5)
    assert np.abs(strips(wider)[1] - strips(image)[1]).max() > 0.1
