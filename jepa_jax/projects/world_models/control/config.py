"""Keys of control: where and how a model is asked to plan."""

import dataclasses

from jepa_jax.config.schema import key
from jepa_jax.projects.world_models.control.planners import PlannerConfig


@dataclasses.dataclass(frozen=True)
class ControlConfig(PlannerConfig):
    """How plans are found, and the episodes that judge them."""

    environment: str = key("", "world to act in: two_rooms, or package.module:Class of your own; empty = none")
    episodes: int = key(300, "episodes of the final evaluation, in the groups of the test split", least=1)
    validation_episodes: int = key(
        0, "episodes of evaluations during training, in the groups that data.validation holds out; 0 = none", least=0
    )
