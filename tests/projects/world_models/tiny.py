"""Small configs of the video methods, on moving shapes of 16 x 16 pixels."""

from typing import Any

from jepa_jax.config.groups import Config
from jepa_jax.program.config import changed_config, load_config
from tests.tiny import dotted

DATA = {
    "data.image_size": 16, "data.max_frames": 6, "data.num_train": 96, "data.num_test": 32, "data.batch_size": 16,
    "optim.reference_batch": 16, "optim.epochs": 1.0, "optim.warmup_epochs": 0.5, "eval.batch_size": 32,
    "eval.max_images": 0, "log.every_steps": 1, "log.tensorboard": False, "train.checkpoint_every_steps": 3,
    "profile.trace_every_epochs": 0,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "video_jepa": {
        "method.stem_width": 4, "method.widths": (4, 6), "method.strides": (2, 1), "method.predictor_widths": (6, 8),
        "method.steps": 2, "method.projector": (8, 8),
    },
    "vjepa": {
        "model.width": 24, "model.depth": 1, "model.heads": 2, "model.patch_size": 2, "method.tubelet_frames": 3,
        "method.predictor_width": 16, "method.predictor_depth": 1, "method.predictor_heads": 2,
    },
}  # fmt: skip
RECIPES = {"video_jepa": "moving_shapes_cpu", "vjepa": "vjepa_quickstart"}


def video_config(method: str, **overrides: Any) -> Config:
    """Returns a small config of a method; overrides are dotted keys with "." written "__"."""
    config = load_config(RECIPES[method], DATA | METHODS[method])
    return changed_config(config, dotted(overrides)) if overrides else config
