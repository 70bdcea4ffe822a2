"""Lion as an update rule of your own: `optim.name=lion:make`.

    export PYTHONPATH=docs/examples
    jepa-jax train --config=quickstart --config.optim.name=lion:make --config.optim.lr=1e-4 --workdir=runs/lion

The rule gets what the step decides: the rate by step (`optim.schedule`), the weight decay by step, and which parameters
decay. Clipping, groups of parameters, layer decay and EMA work as with the rules of the package.

Reference: Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from jepa_jax.config.schema import Group, key


@dataclasses.dataclass(frozen=True)
class LionKeys(Group):
    """Keys that `optim` has with this rule: `--config.optim.beta2=0.98`."""

    beta1: float = key(0.9, "share of the momentum in the direction of an update", least=0, most=1)
    beta2: float = key(0.99, "decay of the momentum", least=0, most=1)


def make(
    optim: Any, rate: optax.Schedule, decay: optax.Schedule, decays: Callable[[Any], Any]
) -> optax.GradientTransformation:
    """Returns everything between the clipped gradient and the update."""
    return optax.lion(rate, b1=optim.beta1, b2=optim.beta2, weight_decay=decay, mask=decays)


make.Keys = LionKeys  # type: ignore[attr-defined]
