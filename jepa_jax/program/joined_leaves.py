"""Update rules that see all small leaves of a tree as one array.

A GPU needs about as long to start a kernel as to update a million numbers, and a vision transformer has hundreds of
norms and biases. Rules that treat each number by itself may see them joined; gradients, parameters and the state of the
optimizer stay as they are outside of the update.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any
SMALL_LEAF = 2**14  # numbers; below it, a leaf costs more to start a kernel for than to compute with


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Joined:
    """A tree whose small leaves are joined: those that decay in one array per type, the others in another."""

    large: list[Any]
    small: list[Any]
    decays: tuple[tuple[bool, ...], tuple[bool, ...]] = dataclasses.field(metadata={"static": True})

    def mask(self) -> "Joined":
        large, small = self.decays
        return Joined(list(large), list(small), self.decays)


class Layout:
    """Where the leaves of a tree are in its joined form; `decays` is a tree of booleans."""

    def __init__(self, tree: PyTree, decays: PyTree):
        structure: Any
        leaves, structure = jax.tree.flatten(tree)
        self.structure = structure
        self.shapes = [leaf.shape for leaf in leaves]
        self.large: list[int] = []
        groups: dict[Hashable, list[int]] = collections.defaultdict(list)
        labels = jax.tree.leaves(decays)
        for i, (leaf, label) in enumerate(zip(leaves, labels, strict=True)):
            (self.large if leaf.size >= SMALL_LEAF else groups[label, leaf.dtype]).append(i)
        self.groups = list(groups.values())
        self.decays = tuple(labels[i] for i in self.large), tuple(labels[group[0]] for group in self.groups)

    def join(self, tree: PyTree) -> Joined:
        leaves = jax.tree.leaves(tree)
        small = [jnp.concatenate([leaves[i].ravel() for i in group]) for group in self.groups]
        return Joined([leaves[i] for i in self.large], small, self.decays)

    def split(self, joined: Sequence[Joined]) -> list[PyTree]:
        """Returns joined trees in the structure of the layout.

        What is joined is stacked and written once. XLA would otherwise copy each leaf by a kernel of its own: it joins
        kernels, but not those that only copy a part of one array.
        """
        trees: list[list[Any]] = [[None] * len(self.shapes) for _ in joined]
        for leaves, one in zip(trees, joined, strict=True):
            for i, leaf in zip(self.large, one.large, strict=True):
                leaves[i] = leaf
        for number, group in enumerate(self.groups):
            rows = jax.lax.optimization_barrier(jnp.stack([one.small[number] for one in joined]))
            for leaves, row, one in zip(trees, rows, joined, strict=True):
                row, start = row.astype(one.small[number].dtype), 0
                for i in group:
                    stop = start + math.prod(self.shapes[i])
                    leaves[i] = row[start:stop].reshape(self.shapes[i])  # [size] -> the leaf's own shape
                    start = stop
        return [jax.tree.unflatten(self.structure, leaves) for leaves in trees]


def chain(
    first: Sequence[optax.GradientTransformation],
    elementwise: Sequence[optax.GradientTransformation],
    decays: Callable[[PyTree], PyTree],
) -> optax.GradientTransformation:
    """Returns `optax.chain` of all rules, of which NVIDIA GPUs compute the elementwise ones on joined leaves.

    Masks of these rules must answer for `Joined` trees too, with `mask`.
    """
    whole = optax.chain(*first, *elementwise)
    if not elementwise:
        return whole
    rest = optax.chain(*elementwise)

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        passed = []
        for rule, own in zip(first, state, strict=False):
            updates, own = rule.update(updates, own, params)
            passed.append(own)
        operands = updates, tuple(state[len(first) :]), params
        updates, last = jax.lax.platform_dependent(
            *operands, cuda=lambda *operands: joined_update(rest, decays, *operands), default=rest.update
        )
        return updates, (*passed, *last)

    return optax.GradientTransformation(whole.init, update)


def joined_update(
    rule: optax.GradientTransformation, decays: Callable[[PyTree], PyTree], updates: PyTree, state: Any, params: PyTree
) -> tuple[PyTree, Any]:
    """Returns what `rule.update` returns, computed on joined leaves."""
    layout = Layout(updates, decays(updates))

    def is_like_updates(node: Any) -> bool:
        return jax.tree.structure(node) == layout.structure

    structure: Any
    nodes, structure = jax.tree.flatten(state, is_leaf=is_like_updates)
    like = [i for i, node in enumerate(nodes) if is_like_updates(node)]
    for i in like:
        nodes[i] = layout.join(nodes[i])
    joined_params = None if params is None else layout.join(params)
    new_updates, new_state = rule.update(layout.join(updates), structure.unflatten(nodes), joined_params)
    new = structure.flatten_up_to(new_state)
    split = layout.split([new_updates, *(new[i] for i in like)])
    for i, tree in zip(like, split[1:], strict=True):
        new[i] = tree
    return split[0], structure.unflatten(new)
