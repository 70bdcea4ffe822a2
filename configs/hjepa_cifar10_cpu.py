"""Hierarchical JEPA on CIFAR-10 that a CPU can train: a small ViT with 4-pixel patches, 3 levels.

    python scripts/train.py --config=configs/hjepa_cifar10_cpu.py --workdir=runs/hjepa_cifar10_cpu --config.data.dir=DIR

Linear probe 48.0 % (47.5 and 48.6, two seeds), untrained 39.0 %; 16 and 18 CPU-minutes on two busy cores
(docs/results/masked.md). The slow target alone keeps features apart: a regulariser cost more than it brought.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "method": {
                "name": "hjepa",
                "predictor_depth": 1,
                "predictor_heads": 2,
                "target": "ema",
                "ema_start": 0.99,
                "ema_end": 1.0,
                "mask": {
                    "num_targets": 4,
                    "target_scale": (0.15, 0.25),
                    "target_aspect": (0.75, 1.5),
                    "context_scale": (0.85, 1.0),
                    "min_context": 10,
                },
                "token_dropping": True,
                "level_weights": (1.0, 0.5, 0.25),
                "fusion": "none",
                "regulariser": "none",
                "regulariser_weight": 1.0,
                "invariance_weight": 1.0,
                "std_weight": 1.0,
                "cov_weight": 0.04,
                "sigreg_weight": 0.05,
                "num_slices": 256,
            },
            "model": {
                "name": "vit",
                "width": 64,
                "depth": 3,
                "heads": 2,
                "patch_size": 4,
                "pool": "mean",
                "cls_token": True,
                "positions": "sincos",
            },
            "data": {
                "source": "cifar10",
                "dir": "",
                "image_size": 32,
                "num_train": 0,
                "num_test": 0,
                "seed": 0,
                "on_error": "refuse",
                "batch_size": 64,
                "num_workers": 0,
                "prefetch": 2,
                "pipeline": "grain",
                "augment": {
                    "crop": {"probability": 1.0, "scale": (0.3, 1.0), "ratio": (0.75, 1.3333), "size": 0},
                    "flip": {"probability": 0.5},
                    "jitter": {"probability": 0.0, "brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1},
                    "grayscale": {"probability": 0.0},
                    "blur": {"probability": 0.0, "sigma": (0.1, 2.0)},
                    "solarize": {"probability": 0.0, "threshold": 128.0},
                    "mean": (0.4914, 0.4822, 0.4465),
                    "std": (0.2023, 0.1994, 0.2010),
                },
            },
            "optim": {
                "name": "adamw",
                "lr": 0.002,
                "weight_decay": 0.04,
                "weight_decay_end": 0.04,
                "epochs": 5.0,
                "warmup_epochs": 0.5,
                "warmup_lr": 1e-06,
                "end_lr": 1e-06,
                "batch_scaling": "none",
                "reference_batch": 64,
                "momentum": 0.9,
                "nesterov": False,
                "beta1": 0.9,
                "beta2": 0.95,
                "clip_norm": 0.0,
                "larc_trust": 0.02,
                "probe_lr": 1e-3,
                "probe_weight_decay": 0.0,
            },
            "train": {
                "seed": 0,
                "max_steps": 0,
                "precision": "float32",
                "accum_steps": 1,
                "remat": "none",
                "stop_on_collapse": False,
                "checkpoint_every_steps": 0,
                "checkpoint_keep": 1,
            },
            "eval": {
                "weights": "target",
                "every_epochs": 5,
                "knn_every_epochs": 0,
                "knn_k": 20,
                "knn_temperature": 0.07,
                "calibration_images": 0,
                "untrained": True,
                "batch_size": 256,
                "max_images": 0,
            },
            "profile": {
                "enabled": True,
                "trace_every_epochs": 1,
                "monitor_seconds": 1.0,
                "peak_tflops": 0.0,
                "plan": True,
                "trace_steps": "",
            },
            "mesh": {"data": -1, "fsdp": 1},
            "log": {"every_steps": 20, "tensorboard": True, "pictures_every_epochs": 0, "wandb_project": ""},
        }
    )
