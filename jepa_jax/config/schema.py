"""What a config may hold: every key, its type, its range and its meaning; checked before anything is compiled.

A config file is complete on its own, so there are no defaults here. Groups are the same for every method; `method` and
`model` hold the keys of the method and the encoder they name.
"""

import dataclasses
import difflib
import hashlib
import importlib.util
import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError


@dataclasses.dataclass(frozen=True)
class Key:
    """One entry of a config: its type, meaning and limits."""

    kind: type
    meaning: str
    choices: tuple = ()
    least: float | None = None
    most: float | None = None
    length: int | None = None  # of a tuple of numbers


PROBABILITY: dict[str, Any] = {"least": 0, "most": 1}

COMMON: dict[str, Key] = {
    "data.source": Key(str, "shapes, cifar10, idx, folder, npz or tfds:<name>"),
    "data.dir": Key(str, "folder or archive of the data; empty for shapes"),
    "data.image_size": Key(int, "pixels a side that images are delivered at", least=4),
    "data.num_train": Key(int, "train images: how many to draw (shapes) or use (0 = all)", least=0),
    "data.num_test": Key(int, "test images: how many to draw (shapes) or use (0 = all)", least=0),
    "data.seed": Key(int, "which images shapes draws", least=0),
    "data.on_error": Key(str, "an unreadable image: stop, or take the next one and count", ("refuse", "skip")),
    "data.batch_size": Key(int, "images a step, over all devices", least=2),
    "data.num_workers": Key(int, "processes that load batches; 0 loads in the main one", least=0),
    "data.prefetch": Key(int, "batches kept ready on the device", least=1),
    "data.pipeline": Key(str, "grain loads batches; device keeps the whole set there", ("grain", "device")),
    "data.augment.crop.probability": Key(float, "share of views cut by a random resized crop", **PROBABILITY),
    "data.augment.crop.scale": Key(tuple, "smallest and largest part of the area", least=0, most=1, length=2),
    "data.augment.crop.ratio": Key(tuple, "smallest and largest width over height", least=0, length=2),
    "data.augment.crop.size": Key(int, "pixels a side of a view; 0 = data.image_size", least=0),
    "data.augment.flip.probability": Key(float, "share of views mirrored left to right", **PROBABILITY),
    "data.augment.jitter.probability": Key(float, "share of views with jittered colours", **PROBABILITY),
    "data.augment.jitter.brightness": Key(float, "largest relative change", least=0),
    "data.augment.jitter.contrast": Key(float, "largest relative change", least=0),
    "data.augment.jitter.saturation": Key(float, "largest relative change", least=0),
    "data.augment.jitter.hue": Key(float, "largest turn of the colour wheel", least=0, most=0.5),
    "data.augment.grayscale.probability": Key(float, "share of views without colour", **PROBABILITY),
    "data.augment.blur.probability": Key(float, "share of blurred views", **PROBABILITY),
    "data.augment.blur.sigma": Key(tuple, "smallest and largest sigma in pixels", least=0, length=2),
    "data.augment.solarize.probability": Key(float, "share of views with bright pixels inverted", **PROBABILITY),
    "data.augment.solarize.threshold": Key(float, "from which level of 0..255 on", least=0, most=256),
    "data.augment.mean": Key(tuple, "of each channel, in 0..1", length=3),
    "data.augment.std": Key(tuple, "of each channel, in 0..1", length=3),
    "optim.name": Key(str, "the update rule", ("larc", "adamw", "sgd")),
    "optim.lr": Key(float, "peak rate at the reference batch", least=0),
    "optim.weight_decay": Key(float, "on kernels, at the start", least=0),
    "optim.weight_decay_end": Key(float, "reached by half a cosine (larc: constant weight_decay)", least=0),
    "optim.epochs": Key(float, "passes over the train split"),
    "optim.warmup_epochs": Key(float, "linear warm-up, from the first step on", least=0),
    "optim.warmup_lr": Key(float, "rate of the first step", least=0),
    "optim.end_lr": Key(float, "rate that the cosine ends at", least=0),
    "optim.batch_scaling": Key(str, "how lr grows with the effective batch", ("none", "linear", "sqrt")),
    "optim.reference_batch": Key(int, "the batch that lr is meant for", least=1),
    "optim.momentum": Key(float, "of larc and sgd", least=0, most=1),
    "optim.nesterov": Key(bool, "of sgd"),
    "optim.beta1": Key(float, "of adamw", least=0, most=1),
    "optim.beta2": Key(float, "of adamw", least=0, most=1),
    "optim.clip_norm": Key(float, "largest norm of the gradient; 0 = no limit", least=0),
    "optim.larc_trust": Key(float, "larc's trust coefficient", least=0),
    "optim.probe_lr": Key(float, "the online probe's own rate (AdamW, cosine)", least=0),
    "optim.probe_weight_decay": Key(float, "of the online probe", least=0),
    "train.seed": Key(int, "of initial weights, order of data, augmentation", least=0),
    "train.max_steps": Key(int, "length of the run and of its schedule in steps; 0 = optim.epochs", least=0),
    "train.precision": Key(str, "what the model computes in; parameters stay float32", ("float32", "bfloat16")),
    "train.accum_steps": Key(int, "parts that a batch is computed in, one after the other", least=1),
    "train.remat": Key(str, "full recomputes each block in the backward pass", ("none", "full")),
    "train.stop_on_collapse": Key(bool, "end the run when its features have collapsed; else only warn"),
    "train.checkpoint_every_steps": Key(int, "0 = at the end of each epoch", least=0),
    "train.checkpoint_keep": Key(int, "how many checkpoints stay", least=1),
    "eval.weights": Key(str, "the encoder as trained, or its slowly following copy", ("online", "target")),
    "eval.every_epochs": Key(int, "test accuracy of the online probe; 0 = at the end only", least=0),
    "eval.knn_every_epochs": Key(int, "k-NN accuracy; 0 = at the end only", least=0),
    "eval.knn_k": Key(int, "neighbours that vote", least=1),
    "eval.knn_temperature": Key(float, "of the votes", least=1e-6),
    "eval.calibration_images": Key(
        int,
        "train images that batch statistics are estimated on, unaugmented, before evaluating; 0 = running ones",
        least=0,
    ),
    "eval.untrained": Key(bool, "also measure the encoder before training"),
    "eval.batch_size": Key(int, "images a step of feature extraction", least=1),
    "eval.max_images": Key(int, "limit for each split in k-NN and probe; 0 = all", least=0),
    "profile.enabled": Key(bool, "account for the time of every epoch, name what holds it up"),
    "profile.trace_every_epochs": Key(int, "split the device's time anew; 0 = never, and as one lump", least=0),
    "profile.monitor_seconds": Key(float, "between two looks at processor, memory, GPUs; 0 = once an epoch", least=0),
    "profile.peak_tflops": Key(
        float, "of one device, for the MFU; 0 = what the table of GPUs says, or measured on a CPU", least=0
    ),
    "profile.plan": Key(bool, "before compiling for a GPU, warn if its plan says that the step does not fit"),
    "profile.trace_steps": Key(str, "record steps A to B for TensorBoard, as A:B; empty = none"),
    "mesh.data": Key(int, "devices that split the batch; -1 = all that are left", least=-1),
    "mesh.fsdp": Key(int, "devices that also split the parameters", least=1),
    "log.every_steps": Key(int, "steps between two rows of metrics.jsonl", least=1),
    "log.tensorboard": Key(bool, "write TensorBoard events"),
    "log.pictures_every_epochs": Key(int, "reconstructions, where a method draws them; 0 = none", least=0),
    "log.wandb_project": Key(str, "Weights & Biases project; empty = off"),
}

MASK = {
    "mask.num_targets": Key(int, "target blocks an image", least=1),
    "mask.target_scale": Key(tuple, "area of a target block, as a part of the image", least=0, most=1, length=2),
    "mask.target_aspect": Key(tuple, "height over width of a target block", least=0, length=2),
    "mask.context_scale": Key(tuple, "area of the context block", least=0, most=1, length=2),
    "mask.min_context": Key(int, "patches that the encoder sees at least", least=1),
}
PREDICTOR = {
    "predictor_depth": Key(int, "blocks of the predictor", least=1),
    "predictor_heads": Key(int, "attention heads of the predictor", least=1),
}
TARGET = {
    "target": Key(
        str,
        "what is predicted: outputs of a slowly following copy (ema), of the encoder itself (online), or of the "
        "encoder and with its gradient (shared)",
        ("ema", "online", "shared"),
    ),
    "ema_start": Key(float, "momentum of the copy at the first step", **PROBABILITY),
    "ema_end": Key(float, "momentum of the copy at the last step, reached linearly", **PROBABILITY),
}
METHODS: dict[str, dict[str, Key]] = {
    "image_jepa": {
        "views": Key(int, "augmented views of an image", least=2),
        "per_view_statistics": Key(bool, "batch norm sees one view at a time, or all views at once"),
        "projector": Key(tuple, "widths of the projector's layers"),
        "loss": Key(str, "what keeps embeddings from collapsing", ("vicreg", "sigreg", "bcs", "infonce")),
        "invariance_weight": Key(float, "vicreg: agreement of views", least=0),
        "std_weight": Key(float, "vicreg: variance of each dimension", least=0),
        "cov_weight": Key(float, "vicreg: covariance of dimensions", least=0),
        "covariance_normalisation": Key(str, "over D (D - 1) or over D", ("pairs", "dimensions")),
        "sigreg_weight": Key(float, "sigreg: lambda in 0..1; bcs: factor of the Gaussian term", least=0),
        "num_slices": Key(int, "sigreg, bcs: random directions a step", least=1),
        "temperature": Key(float, "infonce: of the similarities", least=1e-3),
    },
    "ijepa": {"predictor_width": Key(int, "numbers a token of the predictor", least=4), **PREDICTOR, **TARGET, **MASK},
    "hjepa": {
        **PREDICTOR,
        **TARGET,
        **MASK,
        "token_dropping": Key(bool, "the encoder never computes hidden patches; else they are zeros"),
        "level_weights": Key(tuple, "weight of each level's loss; as many levels, 2 to 4", least=0),
        "fusion": Key(str, "coarse levels join finer ones, top down", ("none", "add", "concat")),
        "regulariser": Key(str, "on image-level features", ("none", "vicreg", "sigreg")),
        "regulariser_weight": Key(float, "of the regulariser in the loss", least=0),
        "invariance_weight": Key(float, "vicreg: agreement of visible part and whole image", least=0),
        "std_weight": Key(float, "vicreg: variance of each dimension", least=0),
        "cov_weight": Key(float, "vicreg: covariance of dimensions", least=0),
        "sigreg_weight": Key(float, "sigreg: lambda in 0..1", **PROBABILITY),
        "num_slices": Key(int, "sigreg: random directions a step", least=1),
    },
    "mae": {
        "mask_ratio": Key(float, "part of the patches that is hidden", **PROBABILITY),
        "norm_pix": Key(bool, "each patch is reconstructed in units of its own mean and deviation"),
        "decoder_width": Key(int, "numbers a token of the decoder", least=4),
        "decoder_depth": Key(int, "blocks of the decoder", least=1),
        "decoder_heads": Key(int, "attention heads of the decoder", least=1),
        "ema_momentum": Key(float, "of the averaged weights, after a ramp of (1 + n) / (10 + n)", **PROBABILITY),
    },
}

RESNET = {
    "stem": Key(str, "3x3 stride 1, or 7x7 stride 2 and max-pool", ("cifar", "imagenet")),
    "width": Key(int, "channels of the first stage", least=1),
}
VIT = {
    "patch_size": Key(int, "pixels a side of a patch", least=1),
    "pool": Key(str, "features are the CLS token or the mean of patches", ("cls", "mean")),
    "cls_token": Key(bool, "a token beside those of the patches"),
    "positions": Key(str, "trained, or fixed sines and cosines", ("learned", "sincos")),
}
CUSTOM_VIT = {
    "width": Key(int, "numbers a token", least=4),
    "depth": Key(int, "blocks", least=1),
    "heads": Key(int, "attention heads", least=1),
    **VIT,
}
PATCHNET = {
    "patch_size": Key(int, "pixels a side of a whitened patch", least=2),
    "stride": Key(int, "pixels between two patches", least=1),
    "stem_width": Key(int, "whitening filters", least=1),
    "widths": Key(tuple, "channels of the learned layers; the last one is 1x1", least=1),
}
MODELS: dict[str, dict[str, Key]] = {
    **dict.fromkeys(("resnet10", "resnet18", "resnet34", "resnet50"), RESNET),
    **dict.fromkeys(("vit_tiny", "vit_small", "vit_base"), VIT),
    "vit": CUSTOM_VIT,
    "patchnet": PATCHNET,
}


def load_config_file(value: str) -> Any:
    """The config of a file, or of `file.py:argument`; a file that cannot be loaded is named."""
    path, *argument = value.split(":", 1)
    if not pathlib.Path(path).is_file():
        raise UserError(f"--config={value}: there is no such file; see configs/")
    spec = importlib.util.spec_from_file_location("loaded_config", path)
    assert spec is not None and spec.loader is not None  # a file that exists has both
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return module.get_config(*argument)
    except Exception as error:  # whatever the file does wrong
        raise UserError(
            f"--config={value}: cannot be loaded ({type(error).__name__}: {error}); fix the file"
        ) from error


def check_overrides(arguments: Sequence[str]) -> None:
    """Refuses `--config.key=value` of a key that the file of `--config=file` does not have, and names the nearest."""
    files = [a.split("=", 1)[1] for a in arguments if a.lstrip("-").startswith("config=")]
    if not files:
        return
    known = flatten(load_config_file(files[-1]))
    for argument in arguments:
        name = argument.lstrip("-").split("=")[0]
        if argument.startswith("-") and name.startswith("config.") and name[7:] not in known:
            close = difflib.get_close_matches(name[7:], known, n=1)
            hint = (
                f"did you mean --config.{close[0]}?"
                if close
                else "its groups are " + ", ".join(dict.fromkeys(key.split(".")[0] for key in known))
            )
            raise UserError(f"{argument}: {files[-1]} has no such key; {hint}")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested groups to dotted keys; lists become tuples, so that a config read back from JSON compares equal."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) or hasattr(value, "to_dict"):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = tuple(value) if isinstance(value, list | tuple) else value
    return flat


def schema(flat: Mapping[str, Any]) -> dict[str, Key]:
    """Every key that a config with this method and model must have."""
    keys = {
        "method.name": Key(str, "what is learned", tuple(METHODS)),
        "model.name": Key(str, "encoder", tuple(MODELS)),
    }
    for group, choices in (("method", METHODS), ("model", MODELS)):
        name = flat.get(f"{group}.name")
        if name not in choices:
            raise UserError(f"config.{group}.name = {name!r}: not one of {', '.join(choices)}")
        keys |= {f"{group}.{key}": value for key, value in choices[name].items()}
    return keys | COMMON


def validate(config: Mapping[str, Any]) -> None:
    """Refuses unknown, missing, ill-typed and out-of-range keys, and combinations that cannot work."""
    flat = flatten(config)
    keys = schema(flat)
    for name in flat:
        if name not in keys:
            close = difflib.get_close_matches(name, keys, n=1)
            hint = f"did you mean config.{close[0]}?" if close else "remove it"
            if name.startswith("model."):
                keys_of_model = ", ".join(MODELS[flat["model.name"]])
                hint = f"model {flat['model.name']} has the keys {keys_of_model}; set them in a config file"
            raise UserError(f"config.{name}: unknown key; {hint}")
    for name, key in keys.items():
        if name not in flat:
            raise UserError(f"config.{name}: missing; add it ({key.meaning})")
        _check(name, flat[name], key)
    _check_combinations(flat)


def _check(name: str, value: Any, key: Key) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = number if key.kind is float else isinstance(value, key.kind)
    if key.kind is int and isinstance(value, bool) or not fits:
        raise UserError(f"config.{name} = {value!r}: must be of type {key.kind.__name__} ({key.meaning})")
    if key.choices and value not in key.choices:
        raise UserError(f"config.{name} = {value!r}: not one of {', '.join(map(str, key.choices))}")
    if key.length is not None and len(value) != key.length:
        raise UserError(f"config.{name} = {value!r}: needs {key.length} numbers ({key.meaning})")
    for part in value if isinstance(value, tuple) else [value] if number else []:
        if isinstance(part, bool) or not isinstance(part, int | float):
            raise UserError(f"config.{name} = {value!r}: {part!r} is not a number ({key.meaning})")
        if not (part == part and abs(part) != float("inf")):
            raise UserError(f"config.{name} = {value!r}: must be finite ({key.meaning})")
        if (key.least is not None and part < key.least) or (key.most is not None and part > key.most):
            limits = f"at least {key.least}" if key.most is None else f"between {key.least} and {key.most}"
            raise UserError(f"config.{name} = {value!r}: must be {limits} ({key.meaning})")


def _check_combinations(flat: Mapping[str, Any]) -> None:
    def refuse(key: str, why: str):
        raise UserError(f"config.{key} = {flat[key]!r}: {why}")

    if flat["optim.epochs"] <= 0 and flat["train.max_steps"] == 0:
        refuse("optim.epochs", "nothing to train; set it above 0, or set train.max_steps")
    if flat["data.batch_size"] % flat["train.accum_steps"]:
        refuse("data.batch_size", f"not divisible by train.accum_steps = {flat['train.accum_steps']}; use a multiple")
    if flat["data.batch_size"] // flat["train.accum_steps"] < 2:
        refuse("train.accum_steps", f"leaves one image a part of data.batch_size = {flat['data.batch_size']}; use less")
    if flat["train.max_steps"] == 0 and flat["optim.warmup_epochs"] > flat["optim.epochs"]:
        refuse("optim.warmup_epochs", f"longer than optim.epochs = {flat['optim.epochs']}; shorten it")
    for key in ("data.augment.crop.scale", "data.augment.crop.ratio", "data.augment.blur.sigma"):
        low, high = flat[key]
        if low > high:
            refuse(key, "the smallest is above the largest; swap them")
    for key in ("data.augment.crop.scale", "data.augment.crop.ratio", "data.augment.std"):
        if min(flat[key]) <= 0:
            refuse(key, "must be above 0")
    if flat["profile.trace_steps"] and not re.fullmatch(r"\d+:\d+", flat["profile.trace_steps"]):
        refuse("profile.trace_steps", "write the first and the last step as A:B, e.g. 10:15")
    if flat["model.name"].startswith("vit"):
        _check_vit(flat, refuse)
    if flat["model.name"] == "patchnet" and flat["train.remat"] != "none":
        refuse("train.remat", "patchnet has nothing to recompute; use none")
    if flat["mesh.data"] == 0:
        refuse("mesh.data", "use -1 for all devices, or a number of devices")
    if flat["eval.weights"] == "target" and flat["method.name"] != "mae" and flat.get("method.target") != "ema":
        refuse("eval.weights", "this method keeps no copy of its encoder; use online")
    if flat["method.name"] in ("ijepa", "hjepa", "mae"):
        _check_masked(flat, refuse)
    if flat["method.name"] == "image_jepa":
        widths = flat["method.projector"]
        if not widths or any(not isinstance(w, int) or w < 1 for w in widths):
            refuse("method.projector", "needs at least one positive width, e.g. (2048, 2048, 2048)")
        if flat["method.loss"] == "sigreg" and flat["method.sigreg_weight"] > 1:
            refuse("method.sigreg_weight", "sigreg's lambda lies between 0 and 1 (LeJEPA: 0.02 to 0.05)")


def _check_vit(flat: Mapping[str, Any], refuse: Callable[[str, str], None]) -> None:
    if flat["model.pool"] == "cls" and not flat["model.cls_token"]:
        refuse("model.pool", "there is no CLS token; use mean, or set model.cls_token = True")
    if flat["model.name"] == "vit" and (flat["model.width"] % flat["model.heads"] or flat["model.width"] % 4):
        refuse("model.width", f"must be a multiple of 4 and of model.heads = {flat['model.heads']}")
    view = flat["data.augment.crop.size"] or flat["data.image_size"]
    if view % flat["model.patch_size"]:
        refuse(
            "model.patch_size",
            f"does not divide the {view}-pixel views; set model.patch_size or data.augment.crop.size",
        )


def _check_masked(flat: Mapping[str, Any], refuse: Callable[[str, str], None]) -> None:
    method = flat["method.name"]
    if not flat["model.name"].startswith("vit"):
        refuse("model.name", f"{method} drops patches before the encoder, which takes a ViT; use vit or vit_tiny")
    if method != "mae" and flat["model.pool"] != "mean":
        refuse("model.pool", f"{method} learns patch features; use mean")
    if method != "hjepa":
        head = "decoder" if method == "mae" else "predictor"
        width, heads = flat[f"method.{head}_width"], flat[f"method.{head}_heads"]
        if width % heads or width % 4:
            refuse(f"method.{head}_width", f"must be a multiple of 4 and of method.{head}_heads = {heads}")
    if method == "mae":
        if not 0 < flat["method.mask_ratio"] < 1:
            refuse("method.mask_ratio", "must lie between 0 and 1, e.g. 0.75")
        return
    for key in ("method.mask.target_scale", "method.mask.target_aspect", "method.mask.context_scale"):
        low, high = flat[key]
        if not 0 < low <= high:
            refuse(key, "needs (smallest, largest) with 0 < smallest <= largest")
    if method == "hjepa" and not 2 <= len(flat["method.level_weights"]) <= 4:
        refuse("method.level_weights", "H-JEPA has 2 to 4 levels; give a weight for each")


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines `config.key: old -> new` for every key of two configs that differs."""
    before, after = flatten(old), flatten(new)
    return [
        f"config.{key}: {before.get(key, '(absent)')} -> {after.get(key, '(absent)')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def config_hash(config: Mapping[str, Any]) -> str:
    """Twelve hex digits that name this config."""
    text = json.dumps(flatten(config), sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
