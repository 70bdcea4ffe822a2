"""Recipes that name a published run have its settings; what differs by design stands in their docstrings."""

import pytest

from jepa_jax.config.recipe import assume_gpus
from jepa_jax.config.schema import flatten
from jepa_jax.program.config import load_config
from jepa_jax.program.optim import make_optimizer

CROP, JITTER, BLUR = "data.augment.crop.scale", "data.augment.jitter", "data.augment.blur.probability"
SOLARIZE = "data.augment.solarize.probability"


def jitter(*strengths):
    """Returns the keys of a jitter of four in five views."""
    names = ("brightness", "contrast", "saturation", "hue")
    keys = {f"{JITTER}.{name}": value for name, value in zip(names, strengths, strict=True)}
    return keys | {f"{JITTER}.probability": 0.8, "data.augment.grayscale.probability": 0.2}


HJEPA = {
    "method.mask.num_targets": 4,
    "method.mask.target_scale": (0.15, 0.25),
    "method.mask.target_aspect": (0.75, 1.5),
    "method.mask.context_scale": (0.85, 1.0),
    "method.level_weights": (1.0, 0.5),
    "method.ema_start": 0.996,
    "method.ema_end": 1.0,
    "model.patch_size": 16,
    "data.batch_size": 32,
    "data.augment.flip.probability": 0.5,
    CROP: (0.8, 1.0),
    f"{JITTER}.probability": 1.0,
    f"{JITTER}.brightness": 0.16,
    f"{JITTER}.contrast": 0.16,
    f"{JITTER}.saturation": 0.08,
    f"{JITTER}.hue": 0.04,
    "optim.name": "adamw",
    "optim.beta1": 0.9,
    "optim.beta2": 0.95,
    "optim.lr": 1.5e-4,
    "optim.warmup_lr": 0.0,
    "optim.end_lr": 1e-6,
    "optim.weight_decay": 0.04,
    "optim.clip_norm": 3.0,
    "train.seed": 42,
}
LEJEPA = {
    "method.views": 2,
    "method.sigreg_weight": 0.05,
    "method.small.count": 6,
    "method.small.role": "context",
    "method.small.crop.scale": (0.05, 0.3),
    "method.small.blur.probability": 0.5,
    "method.small.solarize.probability": 0.2,
    "method.small.jitter.probability": 0.8,
    "data.augment.crop.size": 224,
    CROP: (0.3, 1.0),
    "optim.weight_decay": 0.05,
}
# solo-learn's cifar/*.yaml: what its methods share; both views of the asymmetric ones
SOLO = {
    "model.name": "resnet18",
    "model.stem": "cifar",
    "data.batch_size": 256,
    "data.augment.crop.size": 0,
    CROP: (0.08, 1.0),
    SOLARIZE: 0.0,
    "data.augment.flip.probability": 0.5,
    "data.augment.mean": (0.4914, 0.4822, 0.4465),
    "data.augment.std": (0.247, 0.2435, 0.2616),
    "optim.epochs": 1000.0,
    "optim.warmup_epochs": 10.0,
    "optim.warmup_lr": 3e-5,
    "optim.end_lr": 0.0,
    "optim.schedule": "cosine",
    "optim.momentum": 0.9,
}
SOLO_LARS = SOLO | {
    "optim.name": "larc",
    "optim.larc_clip": True,
    "optim.larc_trust": 0.02,
    "optim.decay_all": False,
}
SOLO_ASYMMETRIC = SOLO_LARS | jitter(0.4, 0.4, 0.2, 0.1) | {
    BLUR: 0.0,
    "method.view_groups": ("second",),
    "method.second.blur.probability": 0.0,
    "method.second.solarize.probability": 0.2,
    "method.second.crop.scale": (0.08, 1.0),
    "method.second.jitter.saturation": 0.2,
}  # fmt: skip
# lightly's imagenette_benchmark.py of 2022: what its methods share
LIGHTLY = jitter(0.4, 0.4, 0.4, 0.1) | {
    "model.name": "resnet18",
    "model.stem": "imagenet",
    "data.batch_size": 256,
    "data.image_size": 128,
    "data.augment.mean": (0.485, 0.456, 0.406),
    "data.augment.std": (0.229, 0.224, 0.225),
    CROP: (0.08, 1.0),
    BLUR: 0.5,
    SOLARIZE: 0.0,
    "optim.name": "sgd",
    "optim.lr": 0.06,
    "optim.momentum": 0.9,
    "optim.weight_decay": 5e-4,
    "optim.decay_all": True,
    "optim.epochs": 800.0,
    "optim.warmup_epochs": 0.0,
    "optim.end_lr": 0.0,
    "eval.knn_k": 200,
    "eval.knn_temperature": 0.1,
}
PUBLISHED = {
    # H-JEPA: m1_max_quick_val.yaml, m1_max_full_20epoch.yaml, m1_max_full_100epoch.yaml
    "hjepa_quick_val": HJEPA
    | {
        f"{JITTER}.brightness": 0.12,
        f"{JITTER}.contrast": 0.12,
        f"{JITTER}.saturation": 0.06,
        f"{JITTER}.hue": 0.03,
        "optim.epochs": 5.0,
        "optim.warmup_epochs": 1.0,
        "optim.lr": 1e-4,
    },
    "hjepa_20epoch": HJEPA | {"optim.epochs": 20.0, "optim.warmup_epochs": 4.0},
    "hjepa_100epoch": HJEPA
    | {
        "method.mask.target_scale": (0.15, 0.2),
        "method.level_weights": (1.0, 0.5, 0.25),
        "data.batch_size": 24,
        "optim.epochs": 100.0,
        "optim.warmup_epochs": 10.0,
        "optim.weight_decay": 0.05,
    },
    # I-JEPA: in1k_vith14_ep300.yaml; 600 epochs and the predictor are the paper's for ViT-B/16
    "ijepa_in1k_vitb": {
        "method.predictor_depth": 6,
        "method.predictor_width": 384,
        "method.ema_start": 0.996,
        "method.ema_end": 1.0,
        "method.mask.num_targets": 4,
        "method.mask.min_context": 10,
        "method.mask.target_scale": (0.15, 0.2),
        "method.mask.target_aspect": (0.75, 1.5),
        "method.mask.context_scale": (0.85, 1.0),
        "data.batch_size": 16 * 128,
        "data.augment.flip.probability": 0.0,
        f"{JITTER}.probability": 0.0,
        "data.augment.grayscale.probability": 0.0,
        BLUR: 0.0,
        "data.augment.solarize.probability": 0.0,
        CROP: (0.3, 1.0),
        "optim.epochs": 600.0,
        "optim.lr": 1e-3,
        "optim.warmup_lr": 2e-4,
        "optim.end_lr": 1e-6,
        "optim.warmup_epochs": 40.0,
        "optim.weight_decay": 0.04,
        "optim.weight_decay_end": 0.4,
    },
    # Image JEPA: default.yaml of EB-JEPA, and the rapid recipe of its followers
    "image_jepa": {
        "method.std_weight": 1.0,
        "method.cov_weight": 80.0,
        "method.projector": (2048,) * 3,
        "optim.lr": 0.3,
        "optim.warmup_lr": 3e-5,
        "optim.epochs": 300.0,
    },
    "rapid": {
        "method.std_weight": 25.0,
        "method.cov_weight": 1.0,
        "method.projector": (4096,) * 3,
        "data.batch_size": 3072,
        "data.num_workers": 16,
        "optim.lr": 0.707,
        "optim.epochs": 50.0,
        "optim.warmup_epochs": 5.0,
        "train.seed": 42,
        "train.precision": "bfloat16",
    },
    # The settings that a published sweep recommends for an A6000
    "jepa_pretrain_gpu": {
        "data.batch_size": 2 * 1024,
        "data.num_workers": 8,
        "data.pipeline": "grain",
        "optim.reference_batch": 2048,
        "train.accum_steps": 2,
        "train.precision": "bfloat16",
    },
    # LeJEPA's paper, and stable-pretraining's Imagenette run of it
    "lejepa_in1k": LEJEPA | {"model.patch_size": 14, "method.small.crop.size": 98, "optim.lr": 5e-4},
    "lejepa_imagenette": LEJEPA | {"model.patch_size": 16, "method.small.crop.size": 96, "optim.lr": 4e-4},
    # The released code of EMP-SSL
    "emp_ssl_cifar10": {
        "method.views": 20,
        "method.similarity_weight": 200.0,
        "method.distortion": 0.2,
        "data.batch_size": 100,
        CROP: (0.25, 0.25),
        "optim.name": "larc",
        "optim.lr": 0.3,
        "optim.weight_decay": 1e-4,
    },
    # solo-learn: cifar/vicreg.yaml
    "vicreg_cifar10": {
        "method.invariance_weight": 25.0,
        "method.std_weight": 25.0,
        "method.cov_weight": 1.0,
        "method.covariance_normalisation": "dimensions",
        "data.batch_size": 256,
        "data.augment.mean": (0.4914, 0.4822, 0.4465),
        "data.augment.std": (0.247, 0.2435, 0.2616),
        "optim.lr": 0.3,
        "optim.epochs": 1000.0,
        "optim.larc_trust": 0.02,
    },
    "byol_cifar10": SOLO_ASYMMETRIC
    | {
        "method.projector": (4096, 256),
        "method.predictor": 4096,
        "method.ema_start": 0.99,
        "method.ema_end": 1.0,
        "optim.lr": 1.0,
        "optim.weight_decay": 1e-5,
    },
    "barlow_cifar10": SOLO_ASYMMETRIC
    | {
        "method.projector": (2048,) * 3,
        "method.redundancy_weight": 0.0051,
        "method.loss_scale": 0.1,
        "optim.lr": 0.3,
        "optim.weight_decay": 1e-4,
    },
    "dino_cifar10": SOLO_ASYMMETRIC
    | {
        "method.views": 1,
        "method.second.role": "both",
        "method.head": (2048, 2048),
        "method.bottleneck": 256,
        "method.prototypes": 4096,
        "method.student_temperature": 0.1,
        "method.teacher_temperature_start": 0.04,
        "method.teacher_temperature": 0.07,
        "method.teacher_warmup": 50 / 1000,
        "method.frozen_last_layer": 1 / 1000,
        "method.centre_momentum": 0.9,
        "method.ema_start": 0.9995,
        "method.ema_end": 1.0,
        "optim.lr": 0.3,
        "optim.weight_decay": 1e-6,
    },
    "simsiam_cifar10": SOLO
    | jitter(0.4, 0.4, 0.4, 0.1)
    | {
        BLUR: 0.5,
        "method.projector": (2048,) * 3,
        "method.predictor": 512,
        "method.constant_predictor_lr": True,
        "optim.name": "sgd",
        "optim.lr": 0.5,
        "optim.weight_decay": 1e-5,
        "optim.decay_all": True,
    },
    "simclr_cifar10": SOLO_LARS
    | jitter(0.8, 0.8, 0.8, 0.2)
    | {
        BLUR: 0.5,
        "method.projector": (2048, 256),
        "method.temperature": 0.2,
        "optim.lr": 0.4,
        "optim.weight_decay": 1e-4,
    },
    "simclr_imagenette": LIGHTLY | {"method.projector": (512, 128), "method.temperature": 0.5},
    "simsiam_imagenette": LIGHTLY
    | {
        "method.projector": (2048,) * 3,
        "method.predictor": 512,
        "method.constant_predictor_lr": False,
    },
    "byol_imagenette": LIGHTLY
    | {
        "method.projector": (4096, 256),
        "method.predictor": 4096,
        "method.ema_start": 0.99,
        "method.ema_end": 0.99,
        "optim.lr": 0.06 / 4,  # of a loss that is four times as large
        "optim.weight_decay": 5e-4 * 4,
    },
    "barlow_imagenette": LIGHTLY | {"method.projector": (2048,) * 3, "method.redundancy_weight": 0.005},
    "vicreg_imagenette": LIGHTLY
    | {
        "method.projector": (2048,) * 3,
        "method.invariance_weight": 25.0,
        "method.std_weight": 25 / 2,  # the published code halves the variance term
        "method.cov_weight": 1.0,
        "method.covariance_normalisation": "dimensions",
        "optim.name": "larc",
        "optim.larc_clip": False,
        "optim.larc_trust": 0.001,
        "optim.lr": 0.3,
        "optim.weight_decay": 1e-4,
        "optim.warmup_epochs": 40.0,
        "optim.warmup_lr": 0.0,
    },
    "dino_imagenette": LIGHTLY
    | jitter(0.4, 0.4, 0.2, 0.1)
    | {
        CROP: (0.4, 1.0),
        BLUR: 1.0,
        "method.views": 1,
        "method.second.role": "both",
        "method.second.crop.scale": (0.4, 1.0),
        "method.second.blur.probability": 0.1,
        "method.second.solarize.probability": 0.2,
        "method.local.role": "context",
        "method.local.count": 6,
        "method.local.crop.size": 64,
        "method.local.crop.scale": (0.05, 0.4),
        "method.local.blur.probability": 0.5,
        "method.head": (2048, 2048),
        "method.bottleneck": 256,
        "method.prototypes": 2048,
        "method.student_temperature": 0.1,
        "method.teacher_temperature_start": 0.04,
        "method.teacher_temperature": 0.04,
        "method.frozen_last_layer": 0.0,
        "method.ema_start": 0.99,
        "method.ema_end": 0.99,
    },
    # The published training script of EmberFormer
    "emberformer_small": {"method.lr_temporal": 1e-3, "method.lr_spatial": 1e-4, "train.precision": "bfloat16"},
    "emberformer": {"method.lr_temporal": 1e-3, "method.lr_spatial": 1e-4, "train.precision": "bfloat16"},
}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_recipe_has_the_published_settings(recipe):
    with assume_gpus():
        config = flatten(load_config(recipe))
    assert {key: config[key] for key in PUBLISHED[recipe]} == PUBLISHED[recipe]


def test_the_rates_of_the_quick_run_are_those_of_its_log():
    """50,000 images in batches of 32, one epoch of warm-up."""
    config, length = load_config("hjepa_quick_val"), 50_000 // 32
    rate = make_optimizer(config.optim, batch_size=32, steps_per_epoch=length, total_steps=5 * length)[1]
    assert [float(rate(step)) for step in (0, 50, 250)] == pytest.approx([0, 3.2e-6, 1.6e-5], rel=1e-3)
