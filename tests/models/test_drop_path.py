"""Stochastic depth of ViT blocks: off by default and in evaluation, per image, with the same expectation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.methods.contract import Ema, Output
from jepa_jax.methods.image_jepa import ImageJepa
from jepa_jax.models.vit import Block, ViT
from jepa_jax.program.config import changed_config
from tests.arrays import create, normal
from tests.stepping import BATCH, STILL, build_program
from tests.tiny import tiny_config, tiny_masked_config

X = normal(1, (2000, 3, 8))


def block(rate):
    return create(lambda: Block(8, 2, drop_path=rate, dtype=jnp.float32, rngs=nnx.Rngs(0)))


def test_without_training_or_rate_no_branch_is_dropped():
    expected = nnx.jit(lambda block, x: block(x, train=True))(block(0.0), X)
    np.testing.assert_array_equal(nnx.jit(lambda block, x: block(x))(block(0.5), X), expected)
    assert not nnx.state(block(0.0), nnx.RngState)


def test_whole_images_are_dropped_and_the_expectation_stays():
    @nnx.jit
    def branches(block, x):
        branch = block.attention(block.norm1(x))
        return branch, block._kept(branch, None, train=True)

    branch, kept = map(np.asarray, branches(block(0.4), X))
    skipped = np.all(kept == 0, axis=(1, 2))
    assert abs(skipped.mean() - 0.4) < 4.5 * np.sqrt(0.24 / 2000)
    np.testing.assert_allclose(kept[~skipped], branch[~skipped] / 0.6, rtol=1e-5)


def test_the_rate_grows_linearly_with_depth():
    vit = nnx.eval_shape(
        lambda: ViT(8, 5, 2, image_size=8, patch_size=4, drop_path=0.4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    )
    rates = [block.drop.rate if block.drop is not None else 0.0 for block in vit.blocks]
    np.testing.assert_allclose(rates, [0, 0.1, 0.2, 0.3, 0.4])


class TwoPassesOfTheTarget(ImageJepa):
    """A method that compares two training passes of its slow copy."""

    ema = Ema(("encoder",), lambda step: 0.9)

    def loss(self, model, target, batch, key, step):
        view = self.whole(batch["image"])
        first, second, own = (encoder(view, train=True) for encoder in (target.encoder, target.encoder, model.encoder))
        return Output(jnp.mean(own), {"target": jnp.abs(first - second).max(), "own": jnp.abs(first - own).max()})


def test_what_is_learned_from_drops_nothing():
    model = {"name": "vit", "width": 16, "depth": 2, "heads": 2, "patch_size": 8, "drop_path": 0.9}
    config = changed_config(tiny_config(method__name=f"{__name__}:TwoPassesOfTheTarget", model=model), STILL)
    program = build_program(config)
    _, metrics = program.train_step(program.factory.create(0, BATCH), BATCH)
    assert float(metrics["target"]) == 0 and float(metrics["own"]) > 0.01


@pytest.mark.slow
def test_recomputed_blocks_drop_the_same_branches():
    def metrics(**options):
        program = build_program(tiny_masked_config("mae", **options))
        state, metrics = program.train_step(program.factory.create(0, BATCH), BATCH)
        assert not any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state))
        return float(metrics["loss"]), float(metrics["grad_norm"])

    kept, dropped = metrics(), metrics(model__drop_path=0.5)
    assert metrics(model__drop_path=0.5, train__remat="full") == pytest.approx(dropped, rel=1e-4)
    assert dropped != pytest.approx(kept, rel=1e-3)
