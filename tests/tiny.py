"""A config small enough for tests: every group, a few images, an encoder of a few thousand parameters."""

from ml_collections import ConfigDict

from configs import hjepa_cifar10_cpu, ijepa_cifar10, mae_quickstart, quickstart


def tiny_config(**overrides) -> ConfigDict:
    """The quickstart config shrunk; overrides are dotted keys with "." written "__"."""
    config = quickstart.get_config()
    config.method.projector = (16, 16)
    config.model = ConfigDict({"name": "patchnet", "patch_size": 4, "stride": 4, "stem_width": 8, "widths": (8, 16)})
    config.data.image_size = 16
    config.data.num_train, config.data.num_test = 96, 32
    config.data.batch_size = 16
    config.optim.epochs, config.optim.warmup_epochs = 2.0, 0.5
    config.eval.batch_size = 32
    config.eval.knn_k = 5
    config.eval.every_epochs = 1
    config.eval.calibration_images = 64
    config.log.every_steps = 1
    config.log.tensorboard = False
    config.train.checkpoint_every_steps = 3
    for name, value in overrides.items():
        set_key(config, name, value)
    return config


def set_key(config: ConfigDict, name: str, value: object) -> None:
    """Sets a dotted key with "." written "__"."""
    *groups, key = name.split("__")
    for group in groups:
        config = config[group]
    config[key] = value


def tiny_masked_config(method: str, **overrides) -> ConfigDict:
    """A masked method on an 8 x 8 grid of 2-pixel patches, with an encoder of one narrow block."""
    shipped = {"ijepa": ijepa_cifar10, "hjepa": hjepa_cifar10_cpu, "mae": mae_quickstart}[method].get_config()
    config = tiny_config(eval__weights="target", eval__calibration_images=0, data__augment__crop__size=0)
    config.method = shipped.method
    config.model = ConfigDict(
        dict(
            name="vit",
            width=16,
            depth=1,
            heads=2,
            patch_size=2,
            pool="mean",
            cls_token=method != "ijepa",
            positions="sincos" if method == "ijepa" else "learned",
        )
    )
    head = {"ijepa": "predictor", "hjepa": "predictor", "mae": "decoder"}[method]
    config.method[f"{head}_depth"], config.method[f"{head}_heads"] = 1, 2
    if method != "hjepa":
        config.method[f"{head}_width"] = 8
    for name, value in overrides.items():
        set_key(config, name, value)
    return config
