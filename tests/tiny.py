"""A config small enough for tests: a few images and an encoder of a few thousand parameters.

The evaluation of the untrained encoder, the profile and the colours of views are off, to save time: tests that look at
them switch them on.
"""

from typing import Any

from jepa_jax.config.groups import Config
from jepa_jax.config.schema import flatten
from jepa_jax.program.config import changed_config, load_config

TINY = {
    "method.projector": (16, 16),
    "model.name": "patchnet",
    "model.patch_size": 4,
    "model.stride": 4,
    "model.stem_width": 8,
    "model.widths": (8, 16),
    "data.image_size": 16,
    "data.num_train": 96,
    "data.num_test": 32,
    "data.batch_size": 16,
    "data.augment.jitter.probability": 0.0,  # crops and flips are random enough
    "data.augment.grayscale.probability": 0.0,
    "optim.reference_batch": 16,
    "optim.epochs": 2.0,
    "optim.warmup_epochs": 0.5,
    "eval.batch_size": 32,
    "eval.knn_k": 5,
    "eval.every_epochs": 1,
    "eval.calibration_images": 64,
    "log.every_steps": 1,
    "eval.untrained": False,
    "log.tensorboard": False,
    "profile.enabled": False,
    "train.checkpoint_every_steps": 3,
}
SHIPPED = {"ijepa": "ijepa_cifar10", "hjepa": "hjepa_cifar10_cpu", "mae": "mae_quickstart"}


def dotted(overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns keywords with "." written "__" as dotted keys."""
    return {name.replace("__", "."): value for name, value in overrides.items()}


def tiny_config(**overrides: Any) -> Config:
    """Returns the quickstart config shrunk; overrides are dotted keys with "." written "__"."""
    config = load_config("quickstart", TINY)
    return changed_config(config, dotted(overrides)) if overrides else config


def tiny_masked_config(method: str, **overrides: Any) -> Config:
    """Returns a masked method on an 8 x 8 grid of 2-pixel patches, with an encoder of one narrow block."""
    shipped = load_config(SHIPPED[method]).to_dict()["method"]
    head = "decoder" if method == "mae" else "predictor"
    small: dict[str, Any] = {f"method.{head}_depth": 1, f"method.{head}_heads": 2}
    small |= {"method.level_weights": (1.0, 0.5, 0.25)} if method == "hjepa" else {f"method.{head}_width": 8}
    model = dict(
        name="vit", width=16, depth=1, heads=2, patch_size=2, cls_token=method != "ijepa",
        positions="sincos" if method == "ijepa" else "learned",
    )  # fmt: skip
    values: dict[str, Any] = {name: v for name, v in TINY.items() if not name.startswith(("model.", "method."))}
    values |= {"method": shipped, "model": model, "eval.weights": "target", "eval.calibration_images": 0}
    values |= {"data.augment.crop.size": 0}
    config = load_config("quickstart", flatten(values) | small)
    return changed_config(config, dotted(overrides)) if overrides else config


RIVALS = {
    "byol": {"method__projector": (16, 8), "method__predictor": 16},
    "simclr": {"method__projector": (16, 8)},
    "simsiam": {"method__projector": (16, 8), "method__predictor": 4},
    "barlow_twins": {"method__projector": (16, 16)},
    "dino": {"method__head": (16,), "method__bottleneck": 8, "method__prototypes": 32},
}


# DINO with hidden patches, KoLeo and Sinkhorn-Knopp, on a ViT of 2 x 2 patches for 16-pixel views.
DINOV2 = RIVALS["dino"] | {
    "method__name": "dino", "method__patches": "ibot", "method__masked_share": (0.25, 0.5),
    "method__koleo_weight": 0.1, "method__centring": "sinkhorn",
    "model__name": "vit", "model__width": 8, "model__depth": 1, "model__heads": 1, "model__patch_size": 8,
}  # fmt: skip


def rival_config(method: str, **overrides: Any) -> Config:
    """Returns the tiny config with a rival of the JEPA: byol, simclr, simsiam, barlow_twins or dino."""
    return tiny_config(method__name=method, **RIVALS.get(method, {}) | overrides)
