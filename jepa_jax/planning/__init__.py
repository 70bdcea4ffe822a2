"""Plans of steps for GPUs that are not there. `plan` is for functions of your own; configs have `jepa-jax plan`."""

from jepa_jax.planning.any_step import StepPlan, plan

__all__ = ["StepPlan", "plan"]
