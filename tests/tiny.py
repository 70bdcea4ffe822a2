"""A config small enough for tests: every group, a few images, an encoder of a few thousand parameters."""

from ml_collections import ConfigDict

from configs import quickstart


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
