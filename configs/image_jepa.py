"""Image JEPA on CIFAR-10 with VICReg: ResNet-18, 300 epochs, batch 256, bfloat16.

    python scripts/prepare_data.py cifar10 --dir=data/cifar10
    python scripts/train.py --config=configs/image_jepa.py --workdir=runs/image_jepa

Cost: 6.0 GFLOP an image (scripts/describe.py), one GPU. Expected: the reference (EB-JEPA) publishes 90.12 % linear
probe for this recipe. Its figure, on its hardware; on a laptop see configs/cifar10_cpu.py.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "method": {
                "name": "image_jepa",
                "views": 2,
                "per_view_statistics": True,
                "projector": (2048, 2048, 2048),
                "loss": "vicreg",
                "invariance_weight": 1.0,
                "std_weight": 1.0,
                "cov_weight": 80.0,
                "covariance_normalisation": "pairs",
                "sigreg_weight": 10.0,
                "num_slices": 256,
                "temperature": 0.2,
            },
            "model": {"name": "resnet18", "stem": "cifar", "width": 64},
            "data": {
                "source": "cifar10",
                "dir": "data/cifar10",
                "image_size": 32,
                "num_train": 0,
                "num_test": 0,
                "seed": 0,
                "on_error": "refuse",
                "batch_size": 256,
                "num_workers": 0,
                "prefetch": 2,
                "pipeline": "device",
                "augment": {
                    "crop": {"probability": 1.0, "scale": (0.2, 1.0), "ratio": (0.75, 1.3333), "size": 0},
                    "flip": {"probability": 0.5},
                    "jitter": {"probability": 0.8, "brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1},
                    "grayscale": {"probability": 0.2},
                    "blur": {"probability": 0.0, "sigma": (0.1, 2.0)},
                    "solarize": {"probability": 0.1, "threshold": 128.0},
                    "mean": (0.4914, 0.4822, 0.4465),
                    "std": (0.2023, 0.1994, 0.2010),
                },
            },
            "optim": {
                "name": "larc",
                "lr": 0.3,
                "weight_decay": 1e-4,
                "weight_decay_end": 1e-4,
                "epochs": 300.0,
                "warmup_epochs": 10.0,
                "warmup_lr": 3e-5,
                "end_lr": 0.0,
                "batch_scaling": "none",
                "reference_batch": 256,
                "momentum": 0.9,
                "nesterov": False,
                "beta1": 0.9,
                "beta2": 0.999,
                "clip_norm": 0.0,
                "larc_trust": 0.02,
                "probe_lr": 1e-3,
                "probe_weight_decay": 0.0,
            },
            "train": {
                "seed": 0,
                "max_steps": 0,
                "precision": "bfloat16",
                "accum_steps": 1,
                "remat": "none",
                "stop_on_collapse": False,
                "checkpoint_every_steps": 0,
                "checkpoint_keep": 1,
            },
            "eval": {
                "weights": "online",
                "every_epochs": 1,
                "knn_every_epochs": 10,
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
