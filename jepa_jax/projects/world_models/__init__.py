"""Learns to predict what happens next in latent space, from video and from actions, and plans with what was learned.

Elements are sequences. Their arrays have the same names in every source and method:

  frames   uint8 [T, H, W, C]
  actions  float32 [T, A]; action t leads from frame t to frame t + 1, so the last one leads out of the sequence
  states   float32 [T, S]: what is known of the world at each frame, such as positions; only probes read it

Importing this package is cheap: jax is imported when a class is used.
"""

import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from jepa_jax.config.groups import DataConfig
    from jepa_jax.projects.world_models.control.environment import Environment
    from jepa_jax.projects.world_models.control.model import FrozenWorldModel

__all__ = ["load_world_model", "make_environment"]

# What the core finds here by name; see jepa_jax.base.classes.ClassTable.
SOURCES = {
    "moving_shapes": "jepa_jax.projects.world_models.sources.moving_shapes:MovingShapes",
    "noisy_shapes": "jepa_jax.projects.world_models.sources.moving_shapes:NoisyShapes",
    "moving_mnist": "jepa_jax.projects.world_models.sources.moving_mnist:MovingMnist",
    "two_rooms": "jepa_jax.projects.world_models.sources.two_rooms:TwoRooms",
    "clips": "jepa_jax.projects.world_models.sources.clips:Clips",
    "trajectories": "jepa_jax.projects.world_models.sources.trajectories:Trajectories",
}
METHODS = {
    "video_jepa": "jepa_jax.projects.world_models.methods.video_jepa:VideoJepa",
    "vjepa": "jepa_jax.projects.world_models.methods.vjepa:VJepa",
    "world_model": "jepa_jax.projects.world_models.methods.world_model:WorldModel",
}
MODELS = {
    "impala": "jepa_jax.projects.world_models.networks.impala:Impala",
    "frame_mlp": "jepa_jax.projects.world_models.networks.frame_mlp:FrameMlp",
}
EVALUATORS = {
    "rollout": "jepa_jax.projects.world_models.evals.rollout:Rollout",
    "control_success": "jepa_jax.projects.world_models.evals.control:Control",
    "predicted_states": "jepa_jax.projects.world_models.evals.prediction:Prediction",
}
RESULTS = {
    "rollout": "jepa_jax.projects.world_models.reports.rollouts:RolloutResults",
    "world_model": "jepa_jax.projects.world_models.reports.results:WorldModelResults",
}
FUNCTIONS = {"load_world_model": "jepa_jax.projects.world_models:load_world_model"}


def load_world_model(workdir: str | pathlib.Path, *, batch_size: int = 256) -> "FrozenWorldModel":
    """Returns the world model of a run, with `encode`, `rollout`, `energy`, `plan` and `export`.

    The weights are those of the best checkpoint if the run keeps one, or else of the newest. The data of the run need
    not be there.

    Args:
        workdir: folder of the run.
        batch_size: elements per call of the compiled functions.

    Raises:
        UserError: the folder holds no run, no checkpoint yet, or a run of a method that learns no world model.
    """
    from jepa_jax.runtime.platforms import import_jax

    import_jax()
    from jepa_jax.projects.world_models.control import model

    return model.load_world_model(workdir, batch_size=batch_size)


def make_environment(name: str, data: "DataConfig", groups: "np.ndarray | None" = None) -> "Environment":
    """Returns an environment.

    Args:
        name: of a shipped one, or "package.module:Class".
        data: the `data` group of a config, such as `model.config.data`.
        groups: those that tasks are drawn of, such as the layouts of a split; None for all.
    """
    from jepa_jax.runtime.platforms import import_jax

    import_jax()
    from jepa_jax.projects.world_models.control import environment

    return environment.make_environment(name, data, groups)
