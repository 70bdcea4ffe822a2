"""Small leaves that are updated as one array: the same numbers and the same state, from fewer operations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jepa_jax.methods.contract import ParamGroup
from jepa_jax.program import joined_leaves, optim
from tests.arrays import normal
from tests.program.test_optim import CONFIG

SHAPES = {
    "encoder": {
        "blocks": {str(i): {"norm": {"scale": (24,), "bias": (24,)}, "up": {"kernel": (24, 96)}} for i in range(6)},
        "token": (1, 1, 24),
        "table": (128, 129),
    },
    "head": {"kernel": (160, 120), "bias": (120,)},
}
EXEMPT = {"encoder/token"}
RULES = {
    "adamw": {"weight_decay": 0.05, "weight_decay_end": 0.4},
    "sgd": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "larc": {"momentum": 0.9, "weight_decay": 1e-4},
    "schedule_free_adamw": {"weight_decay": 0.05},
}


def arrays(seed):
    leaves, structure = jax.tree.flatten(SHAPES, is_leaf=lambda node: isinstance(node, tuple))
    return structure.unflatten([normal(seed + i, shape) for i, shape in enumerate(leaves)])


def rules_of(name):
    config = type(CONFIG)(**{**vars(CONFIG), "name": name, **RULES[name]})
    decays = functools.partial(optim.decay_mask, exempt=EXEMPT)
    rate = optim.warmed_up(optim.cosine(0.1, 0.0, 7), 0.0, 0.1, 2)
    return decays, optim._update_rule(config, rate, total_steps=9, decays=decays)


@pytest.mark.parametrize("name", RULES)
def test_joined_leaves_get_the_same_bits_in_updates_and_state(name):
    decays, (_, rules) = rules_of(name)
    rule = optax.chain(*rules)
    # One operation after the other: what XLA fuses it may round differently.
    plain, joined = rule.update, functools.partial(joined_leaves.joined_update, rule, decays)
    params, state = arrays(0), rule.init(arrays(0))
    for step in range(2):
        gradients = arrays(100 * (step + 1))
        expected, actual = plain(gradients, state, params), joined(gradients, state, params)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)  # also compares the structures
        updates, state = actual
        params = optax.apply_updates(params, updates)


def test_small_leaves_are_joined_by_decay_and_type_and_come_back():
    tree = arrays(0)
    tree["head"]["bias"] = tree["head"]["bias"].astype(jnp.bfloat16)
    layout = joined_leaves.Layout(tree, optim.decay_mask(tree, EXEMPT))
    joined = layout.join(tree)
    sizes = sorted(
        (one.size, str(one.dtype), decays) for one, decays in zip(joined.small, joined.decays[1], strict=True)
    )
    kernels = 6 * 24 * 96
    assert sizes == [(120, "bfloat16", False), (12 * 24 + 24, "float32", False), (kernels, "float32", True)]
    assert [leaf.size for leaf in joined.large] == [128 * 129, 160 * 120]
    for back in layout.split([joined, joined]):
        jax.tree.map(np.testing.assert_array_equal, back, tree)


@pytest.mark.parametrize("groups", [(), (ParamGroup("bias", lr=0.01, frozen_steps=2, clip=1.0),)])
def test_only_gpus_join_and_states_are_those_of_single_leaves(groups):
    config = type(CONFIG)(**{**vars(CONFIG), "name": "adamw", **RULES["adamw"]})
    tx, _ = optim.make_optimizer(config, batch_size=8, steps_per_epoch=3, total_steps=9, groups=groups, exempt=EXEMPT)
    params = {"model": arrays(0)}
    lowered = {
        platform: jax.jit(tx.update).trace(params, tx.init(params), params).lower(lowering_platforms=(platform,))
        for platform in ("cpu", "cuda")
    }
    roots = {platform: one.as_text().count("stablehlo.sqrt") for platform, one in lowered.items()}
    assert roots["cpu"] >= len(jax.tree.leaves(params)) and roots["cuda"] <= 8
    moments = [node.mu for node in jax.tree.leaves(tx.init(params), is_leaf=is_adam) if is_adam(node)]
    assert sum(len(jax.tree.leaves(moment)) for moment in moments) == len(jax.tree.leaves(params))


def is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)
