"""Predicts the next mask of a wildfire from a history of masks, wind and terrain.

    predict = jepa_jax.projects.wildfire.load_predictor("runs/emberformer_cpu")
    probabilities = predict({"fire": fire, "wind": wind, "static": static})  # [N, H, W]

Importing this package is cheap: jax is imported when a model is loaded.
"""

import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jepa_jax.projects.wildfire.evals.predictor import FrozenPredictor

__all__ = ["load_predictor"]

# What the core finds here by name; see jepa_jax.base.classes.ClassTable.
SOURCES = {
    "wildfire": "jepa_jax.projects.wildfire.data.simulated:WildfireSource",
    "fire_sequences": "jepa_jax.projects.wildfire.data.sequences:FireSequences",
    "wsts": "jepa_jax.projects.wildfire.data.wsts:WstsSource",
    "ndws": "jepa_jax.projects.wildfire.data.ndws:NdwsSource",
}
METHODS = {"emberformer": "jepa_jax.projects.wildfire.method:EmberFormerMethod"}
MODELS = {"emberformer": "jepa_jax.projects.wildfire.models.emberformer:EmberFormer"}
FAMILIES = {"SegformerForSemanticSegmentation": "jepa_jax.projects.wildfire.models.segformer_weights:segformer"}
EVALUATORS = {"next_mask": "jepa_jax.projects.wildfire.evals.next_mask:NextMask"}
RESULTS = {"next_mask": "jepa_jax.projects.wildfire.reports.results:NextMaskResults"}


def load_predictor(workdir: str | pathlib.Path, *, batch_size: int = 16) -> "FrozenPredictor":
    """Returns the model of a run, which maps histories of fires to probabilities [N, H, W].

    The weights are those of the best checkpoint if the run keeps one, or else of the newest. The data of the run need
    not be there.

    Args:
        workdir: folder of the run.
        batch_size: histories per call of the compiled model.

    Raises:
        UserError: the folder holds no run, no checkpoint yet, or a run of a method that predicts no masks.
    """
    from jepa_jax.runtime.platforms import import_jax

    import_jax()
    from jepa_jax.projects.wildfire.evals import predictor

    return predictor.load_predictor(workdir, batch_size=batch_size)
