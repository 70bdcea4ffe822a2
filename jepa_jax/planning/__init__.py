"""Predicts memory and speed on GPUs that need not be there. `plan` is for functions; configs have `jepa-jax plan`."""

from jepa_jax.planning.any_step import StepPlan, plan

__all__ = ["StepPlan", "plan"]
