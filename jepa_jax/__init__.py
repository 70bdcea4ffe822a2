"""Train and evaluate joint-embedding self-supervised models in JAX."""

from typing import Any


def load_encoder(workdir: str, *, batch_size: int = 256) -> Any:
    """The trained encoder of a run as a function from uint8 images to features; see `jepa_jax.inference`."""
    from jepa_jax.evals.inference import load_encoder  # jax starts here, not at import

    return load_encoder(workdir, batch_size=batch_size)
