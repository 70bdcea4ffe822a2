"""EmberFormer small enough for tests."""

from typing import Any

from jepa_jax.config.groups import Config
from jepa_jax.program.config import changed_config, load_config
from tests.tiny import dotted

FIRE = {
    "model.width": 8,
    "model.depth": 2,
    "model.heads": 2,
    "model.mlp_width": 16,
    "model.patch_size": 2,
    "model.decoder": "unet",
    "model.decoder_widths": (8, 8),
    "model.refine_width": 8,
    "data.source": "wildfire",
    "data.image_size": 16,
    "data.num_train": 64,
    "data.num_test": 32,
    "data.max_frames": 5,
    "data.frame_buckets": (),
    "data.batch_size": 16,
    "data.validation": 0.0,
    "optim.reference_batch": 16,
    "optim.epochs": 2.0,
    "optim.warmup_epochs": 0.0,
    "eval.batch_size": 16,
    "train.keep_best": "",
    "train.patience": 0,
    "log.every_steps": 1,
    "log.tensorboard": False,
    "log.pictures_every_epochs": 0,
    "profile.enabled": False,
}


def tiny_fire_config(**overrides: Any) -> Config:
    """Returns the EmberFormer for CPUs shrunk, on a few simulated fires."""
    config = load_config("emberformer_cpu", FIRE)
    return changed_config(config, dotted(overrides)) if overrides else config
