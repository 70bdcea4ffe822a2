"""I-JEPA on CIFAR-10 that a CPU can train within 24 CPU-minutes: a small ViT with 8-pixel patches.

    python scripts/train.py --config=configs/ijepa_cifar10.py --workdir=runs/ijepa_cifar10 --config.data.dir=DIR

Linear probe 50.6 % (49.5 and 51.8, two seeds), untrained 38.5 %; 19 and 23 CPU-minutes on two busy cores
(docs/results/masked.md).
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "method": {
                "name": "ijepa",
                "predictor_width": 64,
                "predictor_depth": 2,
                "predictor_heads": 2,
                "target": "ema",
                "ema_start": 0.99,
                "ema_end": 1.0,
                "mask": {
                    "num_targets": 4,
                    "target_scale": (0.15, 0.2),
                    "target_aspect": (0.75, 1.5),
                    "context_scale": (0.85, 1.0),
                    "min_context": 3,
                },
            },
            "model": {
                "name": "vit",
                "width": 128,
                "depth": 4,
                "heads": 4,
                "patch_size": 8,
                "pool": "mean",
                "cls_token": False,
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
                "weight_decay_end": 0.1,
                "epochs": 10.0,
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
                "every_epochs": 2,
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
