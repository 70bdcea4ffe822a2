"""Learns to predict what happens next in latent space, from video and from actions, and plans with what was learned.

Elements are sequences. Their arrays have the same names in every source and method:

  frames   uint8 [T, H, W, C]
  actions  float32 [T, A]; action t leads from frame t to frame t + 1, so the last one leads out of the sequence
  states   float32 [T, S]: what is known of the world at each frame, such as positions; only probes read it

Importing this package is cheap: jax is imported when a class is used.
"""

# What the core finds here by name; see jepa_jax.base.classes.ClassTable.
SOURCES = {
    "moving_shapes": "jepa_jax.projects.world_models.sources.moving_shapes:MovingShapes",
    "moving_mnist": "jepa_jax.projects.world_models.sources.moving_mnist:MovingMnist",
    "clips": "jepa_jax.projects.world_models.sources.clips:Clips",
    "trajectories": "jepa_jax.projects.world_models.sources.trajectories:Trajectories",
}
METHODS = {
    "video_jepa": "jepa_jax.projects.world_models.methods.video_jepa:VideoJepa",
    "vjepa": "jepa_jax.projects.world_models.methods.vjepa:VJepa",
}
EVALUATORS = {"rollout": "jepa_jax.projects.world_models.evals.rollout:Rollout"}
RESULTS = {"rollout": "jepa_jax.projects.world_models.reports.rollouts:RolloutResults"}
