"""Image JEPA on all of CIFAR-10 within 24 CPU-minutes, on a laptop.

    python scripts/train.py --config=configs/cifar10_cpu.py --config.data.dir=DIR --workdir=runs/cifar10_cpu

Cost: 16.5 to 18.6 CPU-minutes in all. Expected: 67.9 % linear probe (67.4 to 68.9, 3 seeds), 56.4 % untrained; see
docs/results/cifar10_cpu.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "method": {
                "name": "image_jepa",
                "views": 4,
                "per_view_statistics": False,
                "projector": (512, 64),
                "loss": "sigreg",
                "invariance_weight": 1.0,
                "std_weight": 1.0,
                "cov_weight": 80.0,
                "covariance_normalisation": "pairs",
                "sigreg_weight": 0.05,
                "num_slices": 256,
                "temperature": 0.2,
            },
            "model": {"name": "patchnet", "patch_size": 6, "stride": 2, "stem_width": 64, "widths": (96, 192, 512)},
            "data": {
                "source": "cifar10",
                "dir": "data/cifar10",
                "image_size": 32,
                "num_train": 0,
                "num_test": 0,
                "seed": 0,
                "on_error": "refuse",
                "batch_size": 128,
                "num_workers": 0,
                "prefetch": 2,
                "pipeline": "grain",
                "augment": {
                    "crop": {"probability": 1.0, "scale": (0.15, 0.4), "ratio": (0.75, 1.3333), "size": 16},
                    "flip": {"probability": 0.5},
                    "jitter": {"probability": 0.8, "brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1},
                    "grayscale": {"probability": 0.2},
                    "blur": {"probability": 0.0, "sigma": (0.1, 2.0)},
                    "solarize": {"probability": 0.0, "threshold": 128.0},
                    "mean": (0.4914, 0.4822, 0.4465),
                    "std": (0.2023, 0.1994, 0.2010),
                },
            },
            "optim": {
                "name": "adamw",
                "lr": 0.002,
                "weight_decay": 0.05,
                "weight_decay_end": 0.05,
                "epochs": 4.0,
                "warmup_epochs": 0.2,
                "warmup_lr": 0.0,
                "end_lr": 0.0,
                "batch_scaling": "none",
                "reference_batch": 128,
                "momentum": 0.9,
                "nesterov": False,
                "beta1": 0.9,
                "beta2": 0.99,
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
                "weights": "online",
                "every_epochs": 0,
                "knn_every_epochs": 0,
                "knn_k": 20,
                "knn_temperature": 0.07,
                "calibration_images": 2000,
                "untrained": True,
                "batch_size": 20,
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
