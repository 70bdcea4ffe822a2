"""Block masks: fixed counts, inside their blocks, nothing seen of a target block, no favourite row or column."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.methods.masking import BlockMasks, MaskConfig, covers, random_split
from jepa_jax.models.tokens import take_tokens
from jepa_jax.program.config import load_config
from tests.tiny import tiny_masked_config

SAMPLES = 10_000


def uniform(shape):
    return np.random.default_rng(0).random(shape, np.float32)


def block_masks(grid, **changes):
    keys = dict(
        num_targets=4, target_scale=(0.15, 0.2), target_aspect=(0.75, 1.5), context_scale=(0.85, 1.0), min_context=1
    )
    return BlockMasks(MaskConfig(**(keys | changes)), grid)


@pytest.mark.parametrize(
    "grid, num_targets, scale, aspect",
    [(4, 1, (0.2, 0.25), (0.4, 2.5)), (7, 4, (0.05, 0.25), (0.75, 1.5)), (14, 4, (0.15, 0.2), (0.4, 0.5))],
)
def test_the_context_never_touches_a_target_block(grid, num_targets, scale, aspect):
    masks = block_masks(grid, num_targets=num_targets, target_scale=scale, target_aspect=aspect)
    sample = jax.jit(masks.sample, static_argnums=1)
    for seed in (0, 1, 2**31 - 1):
        check_blocks(masks, sample, seed)


def check_blocks(masks, sample, seed):
    grid, num_targets = masks.grid, masks.config.num_targets
    scale, aspect = masks.config.target_scale, masks.config.target_aspect
    context, hidden, targets = map(np.asarray, sample(jax.random.key(seed), 8))
    assert context.shape == (8, masks.context_tokens) and masks.context_tokens >= 0.2 * grid**2
    assert targets.shape == (8, num_targets, masks.target_tokens)
    again = sample(jax.random.key(seed), 8)
    np.testing.assert_array_equal(np.concatenate(again[:2], axis=1), np.concatenate([context, hidden], axis=1))
    for image in range(8):
        together = np.concatenate([context[image], hidden[image]])
        assert sorted(together) == list(range(grid**2))
        for target in targets[image]:
            assert len(set(target)) == masks.target_tokens
            # A block is a rectangle: whatever lies between its predicted patches is part of it.
            (top, left), (bottom, right) = ((end(target // grid), end(target % grid)) for end in (np.min, np.max))
            rows, columns = context[image] // grid, context[image] % grid
            assert not np.any((top <= rows) & (rows <= bottom) & (left <= columns) & (columns <= right))
            # The block is no larger than the largest that can be drawn.
            lowest = max(1, np.floor(np.sqrt(scale[0] * grid**2 * aspect[0]) + 0.49))
            assert bottom - top + 1 <= max(1, np.sqrt(scale[1] * grid**2 * aspect[1]) + 0.51)
            assert right - left + 1 <= max(1, scale[1] * grid**2 / lowest + 0.51)


@pytest.mark.parametrize(
    "name",
    ["ijepa_cifar10", "hjepa_cifar10_cpu", "ijepa_in1k_vitb", pytest.param("hjepa_quick_val", marks=pytest.mark.slow)],
)
def test_no_patch_is_forgotten_and_no_row_or_column_is_favoured(name):
    config = load_config(name)
    grid = config.data.view_size // config.model.patch_size
    masks = BlockMasks(config.method.mask, grid)
    context, _, targets = jax.jit(masks.sample, static_argnums=1)(jax.random.key(0), SAMPLES)
    for index, least in ((context, 0.1), (targets[:, :1], 1 / 3), (targets, 1 / 3)):
        index = np.asarray(index).reshape(SAMPLES, -1)
        often = np.bincount(index.ravel(), minlength=grid**2)
        assert often.min() > least * often.max()
        seen = np.zeros((SAMPLES, grid**2), bool)
        np.put_along_axis(seen, index, True, axis=1)
        seen = seen.mean(axis=0).reshape(grid, grid)
        sampling_error = np.sqrt(2 * seen * (1 - seen) / SAMPLES)
        for mirrored in (seen[::-1], seen[:, ::-1], seen[::-1, ::-1]):
            # The largest of 196 normal deviates is below 4.5 but once in a thousand times.
            assert np.all(np.abs(seen - mirrored) < 4.5 * sampling_error)


def test_few_blocks_are_copies_of_the_first():
    masks = block_masks(8, target_scale=(0.15, 0.25))
    blocks = jax.jit(lambda draws: masks._leaving_context(masks._target_blocks(draws)))(uniform((2000, 4, 4, 3)))
    copies = np.all(np.asarray(blocks[:, 1:] == blocks[:, :1]), axis=-1)
    assert 0 < copies.mean() < 0.05


def test_area_and_aspect_of_blocks_are_independent_and_cover_their_ranges():
    masks = block_masks(32, num_targets=1, target_scale=(0.1, 0.3), target_aspect=(0.5, 2.0))
    blocks = np.asarray(jax.jit(masks._target_blocks)(uniform((2000, 3)))).reshape(-1, 32, 32)
    height, width = blocks.any(axis=2).sum(axis=1), blocks.any(axis=1).sum(axis=1)
    area, aspect = height * width / 32**2, height / width
    assert area.min() < 0.11 and area.max() > 0.29 and aspect.min() < 0.55 and aspect.max() > 1.8
    assert abs(np.corrcoef(area, np.log(aspect))[0, 1]) < 0.07  # 3 / sqrt(2000)


def test_the_masks_of_an_image_do_not_depend_on_how_the_batch_is_split():
    masks = block_masks(8)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.jit(masks.sample, static_argnums=1)(jax.random.key(3), 16)
    parted = jax.jit(masks.sample, static_argnums=1, out_shardings=split)(jax.random.key(3), 16)
    jax.tree.map(np.testing.assert_array_equal, whole, parted)


def test_too_few_patches_left_for_a_context_is_an_error_that_names_the_numbers():
    with pytest.raises(UserError, match=r"mask.min_context = 10: 4 targets of 2 patches leave \d of a 4 x 4 grid"):
        tiny_masked_config("ijepa", model__patch_size=4, method__mask__min_context=10)


def test_random_split_keeps_each_patch_equally_often():
    visible, hidden = jax.jit(random_split, static_argnums=(1, 2, 3))(jax.random.key(0), 4000, 16, 4)
    assert np.all(np.sort(np.concatenate([visible, hidden], axis=1), axis=1) == np.arange(16))
    often = np.asarray(covers(visible, 16)).mean(axis=0)
    np.testing.assert_allclose(often, 0.25, atol=4.5 * np.sqrt(0.25 * 0.75 / 4000))


def test_take_tokens_and_covers():
    x = jnp.arange(12.0).reshape(1, 6, 2)
    np.testing.assert_array_equal(take_tokens(x, jnp.array([[4, 0]])), [[[8, 9], [0, 1]]])
    np.testing.assert_array_equal(covers(jnp.array([[[4, 0], [4, 1]]]), 6), [[1, 1, 0, 0, 2, 0]])
