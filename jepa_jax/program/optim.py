"""Optimizers, schedules, decay masks and the EMA of a target network.

The schedule is a function of the update count, evaluated inside the compiled step, so the first update already runs at
the warm-up rate. Update rules and schedules of the user's own are functions:

    def make_rule(optim, rate, decay, decays) -> optax.GradientTransformation
    def make_schedule(optim, *, peak, start, end, warmup_steps, total_steps) -> optax.Schedule

`optim` is the config group with the function's own `Keys`, if it has such an attribute; `rate` and `decay` are
schedules of the learning rate and the weight decay, and `decays` returns the mask of the parameters that decay.
"""

import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jepa_jax.base.classes import find_class
from jepa_jax.base.errors import UserError
from jepa_jax.methods.contract import ParamGroup
from jepa_jax.methods.schedules import cosine, linear, warmed_up
from jepa_jax.program.joined_leaves import SMALL_LEAF, Joined, chain

PyTree = Any
EXACT = jax.lax.Precision.HIGHEST
NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm)
Mask = Callable[[PyTree], PyTree]  # from parameters to a tree of booleans
Rules = list[optax.GradientTransformation]


def scaled_learning_rate(lr: float, batch_size: int, scaling: str, reference_batch: int) -> float:
    """Returns the peak rate for a batch: unchanged, or scaled by its ratio to the reference batch or the root of it."""
    ratio = batch_size / reference_batch
    return lr * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[scaling]


def decay_mask(params: PyTree, exempt: Collection[str] = (), every: bool = False) -> PyTree:
    """Returns True for weights that decay: `every` one, or those of two or more dimensions whose path is not exempt."""
    if isinstance(params, Joined):
        return params.mask()
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: every or (leaf.ndim > 1 and path_of(path) not in exempt), params
    )


def undecayed(model: nnx.Module) -> frozenset[str]:
    """Returns the paths of the parameters that decay would only pull towards zero: offsets and directions, not maps.

    These are biases, everything in a norm, and what its module declares as `nnx.Param(value, decay=False)`, such as
    tokens and tables of positions.
    """
    norms = {path for path, module in nnx.iter_modules(model) if isinstance(module, NORMS)}
    return frozenset(
        "/".join(map(str, path))
        for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))
        if path[-1] == "bias" or path[:-1] in norms or param.get_metadata().get("decay") is False
    )


def scale_by_larc(
    learning_rate: optax.Schedule,
    *,
    trust: float = 0.02,
    weight_decay: float = 1e-4,
    eps: float = 1e-8,
    clip: bool = True,
    every: bool = False,
) -> optax.GradientTransformation:
    """Returns LARC: (g + wd p) * min(trust |p| / (|g| + wd |p| + eps) / lr, 1) where ndim > 1.

    Without `clip` it is LARS: (g + wd p) * trust |p| / (|g| + wd |p| + eps). One-dimensional parameters pass unchanged
    and undecayed, unless `every` parameter is scaled. `optax.lars` is another algorithm, whose momentum comes after the
    rate. Follow with `optax.trace` and `optax.scale_by_learning_rate` of the same schedule.
    """

    def update(updates: PyTree, count: jax.Array, params: PyTree) -> PyTree:
        rate = learning_rate(count)

        def adapt(g: jax.Array, p: jax.Array) -> jax.Array:
            if p.ndim <= 1 and not every:
                return g
            p_norm, g_norm = jnp.linalg.norm(p), jnp.linalg.norm(g)
            local = trust * p_norm / (g_norm + weight_decay * p_norm + eps)
            # At a rate of exactly zero the ratio is infinite and the minimum is 1, as wanted; 0/0 is a zero weight.
            scale = jnp.minimum(local / jnp.maximum(rate, 1e-30), 1.0) if clip else local
            return (g + weight_decay * p) * jnp.where(p_norm > 0, scale, 1.0)

        return jax.tree.map(adapt, updates, params)

    return counted(update)


def counted(change: Callable[[PyTree, jax.Array, PyTree], PyTree]) -> optax.GradientTransformation:
    """Returns the transformation that `change` makes of updates, the number of earlier ones, and parameters."""

    def init(params: PyTree) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    def update(
        updates: PyTree, state: optax.ScaleByScheduleState, params: PyTree = None
    ) -> tuple[PyTree, optax.ScaleByScheduleState]:
        return change(updates, state.count, params), optax.ScaleByScheduleState(state.count + 1)

    return optax.GradientTransformation(init, update)


def make_optimizer(
    config: Any,
    *,
    batch_size: int,
    steps_per_epoch: int,
    total_steps: int,
    groups: Sequence[ParamGroup] = (),
    exempt: Collection[str] = (),
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Returns the transformation of `{"model": ..., "probe": ...}` parameters and the model's rate by step.

    Args:
      config: the `optim` group.
      batch_size: images per update, over all devices and accumulation steps.
      steps_per_epoch: to turn `warmup_epochs` into steps.
      total_steps: where the schedule ends.
      groups: parameters of the model with a rate or decay of their own; the first whose pattern matches counts.
      exempt: paths of parameters that do not decay, besides those of one dimension.
    """
    scale = scaled_learning_rate(1.0, batch_size, config.batch_scaling, config.reference_batch)
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), total_steps)

    def rate_of(lr: float) -> optax.Schedule:
        share = lr / config.lr if config.lr else 1.0  # all of a group's schedule is in proportion
        start, end = share * config.warmup_lr, share * config.end_lr
        return make_schedule(
            config, peak=lr * scale, start=start, end=end, warmup_steps=warmup_steps, total_steps=total_steps
        )

    decays = functools.partial(decay_mask, exempt=exempt, every=config.decay_all)
    update_rule = functools.partial(_update_rule, config, decays=decays, total_steps=total_steps)
    rate = rate_of(config.lr)
    whole, elementwise = update_rule(rate)
    model = chain([*_clip(config), *whole], elementwise, decays)
    if groups:
        rules, labels = {"": chain(whole, elementwise, decays)}, functools.partial(group_labels, groups=groups)
        for i, group in enumerate(groups):
            lr = config.lr if group.lr is None else group.lr
            own_rate = optax.constant_schedule(lr * scale) if group.constant else rate_of(lr)
            rules[str(i)] = group_rule(group, *update_rule(own_rate, decay=group.weight_decay), decays)
        # Excludes frozen groups from the clipping norm.
        model = optax.chain(freeze_groups(groups), *_clip(config, groups), optax.partition(rules, labels))
    if config.layer_decay < 1:
        model = optax.chain(model, scale_by_layer(config.layer_decay))
    if config.name == "schedule_free_adamw":
        # Its count starts at 1, that of the rates at 0.
        model = optax.contrib.schedule_free(model, lambda count: rate(count - 1), b1=config.beta1)
        model = optax.chain(model, freeze_groups(groups)) if groups else model  # no rounding where nothing moves
    # The probe reads detached features: its rate is its own, and the model's clipping never sees its gradient.
    probe = optax.adamw(cosine(config.probe_lr, 0.0, total_steps), weight_decay=config.probe_weight_decay)
    return optax.partition({"model": model, "probe": probe}, lambda params: {name: name for name in params}), rate


def scale_by_layer(decay: float) -> optax.GradientTransformation:
    """Scales the updates of the encoder by decay^(layers that follow): tokens, positions and the first layer least.

    The last norm and everything beside the encoder pass unchanged.
    """

    def factors(params: PyTree) -> PyTree:
        paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        blocks = [int(found[1]) for path in paths if (found := re.match(r"encoder/blocks/(\d+)/", path))]
        if not blocks:
            raise UserError(f"config.optim.layer_decay = {decay}: this encoder has no blocks; use 1")
        depth = 1 + max(blocks)

        def factor(path: Any, leaf: jax.Array) -> float:
            name = path_of(path)
            found = re.match(r"encoder/blocks/(\d+)/", name)
            layer = 1 + int(found[1]) if found else 0 if re.match("encoder/(?!norm/)", name) else depth + 1
            return decay ** (depth + 1 - layer)

        return jax.tree_util.tree_map_with_path(factor, params)

    return optax.stateless(lambda updates, _: jax.tree.map(lambda u, f: u * f, updates, factors(updates)))


def _clip(config: Any, groups: Sequence[ParamGroup] = ()) -> list[optax.GradientTransformation]:
    if config.clip_norm <= 0:
        return []
    if any(group.frozen_steps > 0 or group.clip is not None for group in groups):
        return [clip_what_moves(config.clip_norm, groups)]
    return [clip_by_norm(config.clip_norm)]


def clip_by_norm(clip_norm: float) -> optax.GradientTransformation:
    """Returns the rule that scales updates so that their norm together is at most `clip_norm`."""

    def clip(updates: PyTree, params: PyTree) -> PyTree:
        factor = clip_factor(updates, clip_norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates)

    return optax.stateless(clip)


def global_norm(tree: PyTree) -> jax.Array:
    """Returns the Euclidean norm of all leaves together.

    `optax.global_norm` compiles to several kernels per leaf, most of them for a few hundred numbers; here all small
    leaves share theirs, and on NVIDIA GPUs large ones share the sum of what the rows add up to.
    """
    leaves = [jnp.asarray(leaf, jnp.float32) for leaf in jax.tree.leaves(tree)]
    if not leaves:
        return jnp.zeros([])
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get("fsdp", 1) > 1:  # rows that devices share would be gathered
        return _norm_by_leaves(*leaves)
    return jax.lax.platform_dependent(*leaves, cuda=_norm_by_rows, default=_norm_by_leaves)


def _norm_by_rows(*leaves: jax.Array) -> jax.Array:
    norms = [leaf if leaf.size < SMALL_LEAF else jnp.linalg.norm(leaf, axis=-1) for leaf in leaves]
    joined = jnp.concatenate([norm.ravel() for norm in norms])
    return jnp.sqrt(jnp.dot(joined, joined, precision=EXACT))  # XLA would divide a sum among the leaves again


def _norm_by_leaves(*leaves: jax.Array) -> jax.Array:
    small = [leaf.ravel() for leaf in leaves if leaf.size < SMALL_LEAF]
    squares = [jnp.tensordot(leaf, leaf, leaf.ndim, precision=EXACT) for leaf in leaves if leaf.size >= SMALL_LEAF]
    if small:
        joined = jnp.concatenate(small)
        squares.append(jnp.dot(joined, joined, precision=EXACT))
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def clip_factor(updates: PyTree, clip_norm: float) -> jax.Array:
    return clip_norm / jnp.maximum(global_norm(updates), clip_norm)


def clip_what_moves(clip_norm: float, groups: Sequence[ParamGroup]) -> optax.GradientTransformation:
    """Returns clipping by the norm of the gradients of what moves at a step.

    Gradients of groups that are still frozen are clipped by the norm of all. They are not zeroed: the moments of Adam
    would then start from zero with a bias correction that is over, and the first steps would be several times too long.
    Groups with a clip of their own pass unchanged and do not count.
    """
    own = {str(i) for i, group in enumerate(groups) if group.clip is not None}

    def update(updates: PyTree, count: jax.Array, params: PyTree) -> PyTree:
        del params
        labels = group_labels(updates, groups)
        moves = {"": jnp.array(True), **{str(i): count >= group.frozen_steps for i, group in enumerate(groups)}}
        shared = jax.tree.map(lambda g, label: jnp.zeros_like(g) if label in own else g, updates, labels)
        moving = jax.tree.map(lambda g, label: jnp.where(moves[label], g, 0), shared, labels)
        of_moving, of_all = (clip_factor(t, clip_norm) for t in (moving, shared))

        def clip(g: jax.Array, label: str) -> jax.Array:
            return g if label in own else g * jnp.where(moves[label], of_moving, of_all).astype(g.dtype)

        return jax.tree.map(clip, updates, labels)

    return counted(update)


def freeze_groups(groups: Sequence[ParamGroup]) -> optax.GradientTransformation:
    """Returns the rule that zeroes the updates of frozen groups and passes the rest."""
    rules = {str(i): optax.set_to_zero() if g.frozen_steps < 0 else optax.identity() for i, g in enumerate(groups)}
    return optax.partition({"": optax.identity(), **rules}, functools.partial(group_labels, groups=groups))


def path_of(path: Any) -> str:
    """Returns the path of a parameter as `ParamGroup` patterns see it, e.g. encoder/norm/scale."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removeprefix("model/")


def group_labels(params: PyTree, groups: Sequence[ParamGroup]) -> PyTree:
    """Returns the number of the first group whose pattern matches, as text, for each parameter; "" for the rest."""

    def label(path: Any, leaf: jax.Array) -> str:
        del leaf
        return next((str(i) for i, group in enumerate(groups) if re.search(group.pattern, path_of(path))), "")

    labels = jax.tree_util.tree_map_with_path(label, params)
    for i, group in enumerate(groups):
        if str(i) not in jax.tree.leaves(labels):
            fix = "paths are like encoder/norm/scale, and the first group that matches counts"
            raise UserError(f"ParamGroup({group.pattern!r}): no parameter is in this group; {fix}")
    return labels


def group_rule(group: ParamGroup, whole: Rules, elementwise: Rules, decays: Mask) -> optax.GradientTransformation:
    """Returns the update rule of a group of parameters, which is frozen for some steps or for ever."""
    if group.frozen_steps < 0:
        return optax.set_to_zero()
    if group.clip is not None:
        whole = [clip_by_norm(group.clip), *whole]
    if group.frozen_steps:
        thaw = optax.scale_by_schedule(lambda count: jnp.where(count < group.frozen_steps, 0.0, 1.0))
        elementwise = [*elementwise, thaw]
    return chain(whole, elementwise, decays)


def _update_rule(
    config: Any, rate: optax.Schedule, *, total_steps: int, decays: Mask, decay: float | None = None
) -> tuple[Rules, Rules]:
    """Returns everything between the clipped gradient and the update; `decay` replaces the config's weight decay.

    The second list has the rules that treat each number by itself.
    """
    constant = config.weight_decay if decay is None else decay
    if config.name == "larc":
        larc = scale_by_larc(
            rate, trust=config.larc_trust, weight_decay=constant, clip=config.larc_clip, every=config.decay_all
        )
        return [larc], [optax.trace(config.momentum), optax.scale_by_learning_rate(rate)]
    if config.name == "schedule_free_adamw":
        return [], [  # AdamW without momentum, for which averaging stands in
            optax.scale_by_rms(config.beta2, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(constant, mask=decays),
            optax.scale_by_learning_rate(rate),
        ]
    last = getattr(config, "weight_decay_end", constant) if decay is None else decay  # a rule of the user's may lack it
    falling = cosine(constant, last, total_steps)
    if config.name == "muon":
        return [muon(config, rate, falling, decays)], []
    decayed = optax.add_decayed_weights(falling, mask=decays)
    if config.name == "adamw":
        return [], [optax.scale_by_adam(b1=config.beta1, b2=config.beta2), decayed, optax.scale_by_learning_rate(rate)]
    if config.name == "sgd":
        momentum = optax.trace(config.momentum, nesterov=config.nesterov)
        return [], [decayed, momentum, optax.scale_by_learning_rate(rate)]
    rule = find_class("optim.name", config.name, {})(config, rate, falling, decays)
    if not isinstance(rule, optax.GradientTransformation):
        kind = type(rule).__name__
        raise UserError(f"config.optim.name = {config.name!r}: returns {kind}; return an optax.GradientTransformation")
    return [rule], []


def make_schedule(
    config: Any, *, peak: float, start: float, end: float, warmup_steps: int, total_steps: int
) -> optax.Schedule:
    """Returns what `optim.schedule` names: a rate by step, from `start` over `peak`, after the warm-up, to `end`.

    Reference of wsd (warm-up, stable, decay): Hu et al., "MiniCPM", 2024.
    """
    rest = total_steps - warmup_steps
    if config.schedule == "wsd":
        fall_steps = min(round(config.decay_fraction * total_steps), rest)
        fall = linear(peak, end, fall_steps)
        return warmed_up(lambda count: fall(count - rest + fall_steps), start, peak, warmup_steps)
    if config.schedule == "constant" or config.name == "schedule_free_adamw":
        return warmed_up(linear(peak, peak, rest), start, peak, warmup_steps)
    if config.schedule in ("cosine", "linear"):
        after = (cosine if config.schedule == "cosine" else linear)(peak, end, rest)
        return warmed_up(after, start, peak, warmup_steps)
    make = find_class("optim.schedule", config.schedule, {})
    schedule = make(config, peak=peak, start=start, end=end, warmup_steps=warmup_steps, total_steps=total_steps)
    if not callable(schedule):
        kind = type(schedule).__name__
        raise UserError(f"config.optim.schedule = {config.schedule!r}: returns {kind}; return a function of the step")
    return schedule


def muon(config: Any, rate: optax.Schedule, decay: optax.Schedule, decays: Mask) -> optax.GradientTransformation:
    """Returns Muon for kernels, as matrices [all inputs, outputs], and AdamW without decay for the rest.

    References: Jordan et al., "Muon", 2024; the scale that makes rates those of AdamW: Liu et al., "Muon is Scalable
    for LLM Training", 2025.
    """

    def matrices(params: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf: optax.contrib.MuonDimensionNumbers(range(leaf.ndim - 1), leaf.ndim - 1), params
        )

    kernels = optax.contrib.muon(
        rate,
        ns_steps=config.ns_steps,
        beta=config.momentum,
        nesterov=config.nesterov,
        weight_decay=decay,
        muon_weight_dimension_numbers=matrices,
        consistent_rms=config.update_rms,
    )
    own_rate = optax.scale_by_learning_rate(lambda count: config.adam_lr_factor * rate(count))
    rest = chain([], [optax.scale_by_adam(b1=config.beta1, b2=config.beta2), own_rate], decays)
    return optax.partition({True: kernels, False: rest}, decays)


def averaged_params(params: PyTree, opt_state: PyTree) -> PyTree:
    """Returns the model's parameters to evaluate: the average that a schedule-free rule keeps, or else `params`."""

    def is_average(node: Any) -> bool:
        return isinstance(node, optax.contrib.ScheduleFreeState)

    for node in jax.tree.leaves(opt_state, is_leaf=is_average):
        if is_average(node):
            return _average(node._replace(z=node.z["model"]), params)
    return params


_average = jax.jit(optax.contrib.schedule_free_eval_params)


def ema_update(target: PyTree, online: PyTree, momentum: jax.Array | float) -> PyTree:
    """Returns momentum * target + (1 - momentum) * online, leaf by leaf; integer leaves follow the online tree."""

    def blend(t: jax.Array, o: jax.Array) -> jax.Array:
        return t * momentum + o * (1 - momentum) if jnp.issubdtype(t.dtype, jnp.floating) else o

    return jax.tree.map(blend, target, online)
