"""Optimizers, schedules, decay masks and the EMA of a target network.

The schedule is a function of the update count, evaluated inside the compiled step, so the first update already runs at
the warm-up rate.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jepa_jax.base.errors import UserError
from jepa_jax.methods.schedules import cosine, warmup_cosine

PyTree = Any
# Leaves that are directions or offsets rather than maps: decay would only pull them towards zero.
UNDECAYED = ("bias", "scale", "cls_token", "mask_token", "context_token", "position")


def scaled_learning_rate(lr: float, batch_size: int, scaling: str, reference_batch: int) -> float:
    """The peak rate for an effective batch: unchanged, or scaled by the ratio to the reference batch or by its root."""
    ratio = batch_size / reference_batch
    return lr * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[scaling]


def decay_mask(params: PyTree) -> PyTree:
    """True for weights that decay: kernels, not biases, norm scales, tokens or positions."""

    def decays(path, leaf):
        return leaf.ndim > 1 and getattr(path[-1], "key", None) not in UNDECAYED

    return jax.tree_util.tree_map_with_path(decays, params)


# How many updates were made: the trust ratio needs the rate of the present one.
LarcState = optax.ScaleByScheduleState


def scale_by_larc(
    learning_rate: optax.Schedule, *, trust: float = 0.02, weight_decay: float = 1e-4, eps: float = 1e-8
) -> optax.GradientTransformation:
    """Layer-wise adaptive rate control: (g + wd p) * min(trust |p| / (|g| + wd |p| + eps) / lr, 1) where ndim > 1.

    One-dimensional parameters pass unchanged and undecayed. This is the clipped form used by EB-JEPA; `optax.lars` is
    another algorithm. Follow with `optax.trace` and `optax.scale_by_learning_rate` of the same schedule.
    """

    def init(params):
        del params
        return LarcState(jnp.zeros([], jnp.int32))

    def update(updates, state, params):
        rate = learning_rate(state.count)

        def adapt(g, p):
            if p.ndim <= 1:
                return g
            p_norm, g_norm = jnp.linalg.norm(p), jnp.linalg.norm(g)
            local = trust * p_norm / (g_norm + weight_decay * p_norm + eps)
            # At a rate of exactly zero the ratio is infinite and the minimum is 1, as wanted; 0/0 is a zero weight.
            scale = jnp.where(p_norm > 0, jnp.minimum(local / jnp.maximum(rate, 1e-30), 1.0), 1.0)
            return (g + weight_decay * p) * scale

        return jax.tree.map(adapt, updates, params), LarcState(state.count + 1)

    return optax.GradientTransformation(init, update)


def make_optimizer(config: Any, *, batch_size: int, steps_per_epoch: int, total_steps: int):
    """The transformation for `{"model": ..., "probe": ...}` parameters and the model's rate by step.

    Args:
        config: the `optim` group.
        batch_size: images an update, over all devices and accumulation steps.
        steps_per_epoch: to turn `warmup_epochs` into steps.
        total_steps: where the cosine ends.
    """
    peak = scaled_learning_rate(config.lr, batch_size, config.batch_scaling, config.reference_batch)
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), total_steps)
    rate = warmup_cosine(
        peak, warmup_steps=warmup_steps, total_steps=total_steps, start=config.warmup_lr, end=config.end_lr
    )
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm > 0 else []
    model = optax.chain(*clip, *_update_rule(config, rate, total_steps))
    # The probe reads detached features: its rate is its own, and the model's clipping never sees its gradient.
    probe = optax.adamw(
        warmup_cosine(config.probe_lr, warmup_steps=0, total_steps=total_steps), weight_decay=config.probe_weight_decay
    )
    transforms = {"model": model, "probe": probe}
    return optax.partition(transforms, {"model": "model", "probe": "probe"}), rate


def _update_rule(config: Any, rate: optax.Schedule, total_steps: int) -> list[optax.GradientTransformation]:
    """Everything between the clipped gradient and the update."""
    if config.name == "larc":
        return [
            scale_by_larc(rate, trust=config.larc_trust, weight_decay=config.weight_decay),
            optax.trace(config.momentum),
            optax.scale_by_learning_rate(rate),
        ]
    decay = optax.add_decayed_weights(
        cosine(config.weight_decay, config.weight_decay_end, total_steps), mask=decay_mask
    )
    if config.name == "adamw":
        return [optax.scale_by_adam(b1=config.beta1, b2=config.beta2), decay, optax.scale_by_learning_rate(rate)]
    if config.name == "sgd":
        momentum = optax.trace(config.momentum, nesterov=config.nesterov)
        return [decay, momentum, optax.scale_by_learning_rate(rate)]
    raise UserError(f"optim.name = {config.name!r}: not one of larc, adamw, sgd")


def ema_update(target: PyTree, online: PyTree, momentum: jax.Array | float) -> PyTree:
    """momentum * target + (1 - momentum) * online, leaf by leaf; integer leaves follow the online tree."""

    def blend(t, o):
        return t * momentum + o * (1 - momentum) if jnp.issubdtype(t.dtype, jnp.floating) else o

    return jax.tree.map(blend, target, online)
