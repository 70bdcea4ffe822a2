"""The groups that every run has, and the config as a whole; `method` and `model` are declared by their owners."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from jepa_jax.base.processes import num_cores
from jepa_jax.config.augment import AugmentConfig, Crops, ViewGroup
from jepa_jax.config.optim import OptimConfig
from jepa_jax.config.schema import Group, Problem, flatten, key, nested, subgroup

WORKERS_PER_CORE = 2  # more only wait for one another
MOST_AUTO_WORKERS = 64


@dataclasses.dataclass(frozen=True)
class DataConfig(Group):
    """What is trained on, and how it is loaded."""

    source: str = key(
        "shapes",
        "shapes, cifar10, idx, folder, shards, parquet, npz, tfds:<name>, webdataset, a source of a project, or "
        "package.module:name of a class or function",
    )
    dir: str = key("", "folder or archive of the data; empty for synthetic sources")
    image_size: int = key(32, "pixels per side that images are delivered at", least=4)
    shorter_side: int = key(
        0,
        "pixels that the shorter side of a photograph is resized to before its centre is cropped; 0 = image_size",
        least=0,
    )
    crops: str = key(
        "device",
        "where random crops are cut: on the device, out of images of data.image_size, or by the loader, out of full "
        "photographs while they are decoded (folder, shards, parquet, tfds)",
        choices=("device", "loader"),
    )
    channels: int = key(3, "channels of an image: 1 grey, 3 RGB, 4 RGBA; npz files may have any number", least=1)
    num_train: int = key(0, "train images: how many to generate (synthetic sources) or use (0 = all)", least=0)
    num_test: int = key(0, "test images: how many to generate (synthetic sources) or use (0 = all)", least=0)
    validation: float = key(
        0.0,
        "fraction of the train split used for validation instead of training; groups stay together; 0 = none; a set "
        "with a validation split of its own uses that for any other",
        least=0,
        most=0.5,
    )
    fold: int = key(0, "which of the splits that a data set defines; no effect on sets with one split", least=0)
    max_frames: int = key(20, "frames to which a sequence is padded; no effect on images", least=1)
    frame_stride: int = key(
        1, "steps of a recording or of a simulation from one frame of a sequence to the next", least=1
    )
    frame_buckets: tuple[int, ...] = key(
        (), "shorter lengths to pad to, ascending; one compilation each", least=1, entry=int
    )
    seed: int = key(0, "seed of the elements that synthetic sources generate", least=0)
    shuffle_window: int = key(
        -1,
        "train elements of a stream that are shuffled among each other; auto (-1): 1,000 of tar files, none of others",
        least=-1,
        words={"auto": -1},
    )
    on_error: str = key(
        "refuse",
        "on an unreadable image: stop (refuse), or use the next image and count it (skip)",
        choices=("refuse", "skip"),
    )
    batch_size: int = key(256, "images per update, over all devices and accumulation steps", least=2)
    num_workers: int = key(
        0,
        "processes that load batches, beside each training process; 0 loads in a thread; auto (-1): by the cores",
        least=-1,
        words={"auto": -1},
    )
    worker_threads: int = key(
        1, "batches that each worker makes at once, a thread for each; without workers no effect", least=1, most=64
    )
    worker_timeout: float = key(
        300.0, "seconds without a batch after which a worker is restarted; more than any batch takes", least=0.1
    )
    prefetch: int = key(2, "batches kept ready on the device", least=1)
    pipeline: str = key(
        "grain", "grain loads batches; device keeps the whole set on the device", choices=("grain", "device")
    )
    statistics: str = key(
        "config",
        "mean and std of data.augment: as in the config, or computed from 1,000 images of the set and stored beside it",
        choices=("config", "set"),
    )
    transforms: tuple[str, ...] = key(
        (), "functions of batches that change all elements as they are read, package.module:function", entry=str
    )
    augment: AugmentConfig = subgroup(AugmentConfig)

    @property
    def view_size(self) -> int:
        return self.augment.crop.size or self.image_size

    @property
    def workers(self) -> int:
        """Worker processes on this machine: `num_workers`, but not more than the cores can use."""
        cores = num_cores()
        if self.num_workers < 0:
            return 0 if self.pipeline == "device" else min(cores - 1, MOST_AUTO_WORKERS)
        return min(self.num_workers, WORKERS_PER_CORE * cores)

    def problems(self, config: "Config") -> Iterator[Problem]:
        if self.validation and self.on_error == "skip":
            yield Problem("data.on_error", "skip could mix validation images into training; use refuse")
        if 0 < self.shorter_side < self.image_size:
            yield Problem("data.shorter_side", f"below data.image_size = {self.image_size}; use that or more, or 0")
        if self.crops == "loader" and self.pipeline == "device":
            yield Problem("data.crops", "needs the files, and data.pipeline = device reads them once; use grain")
        if self.crops == "loader" and not config.method.num_views:
            yield Problem("data.crops", f"{config.method.name} makes no views that a loader can cut; use device")


@dataclasses.dataclass(frozen=True)
class TrainConfig(Group):
    """Seeds, precision, memory and checkpoints."""

    seed: int = key(0, "seed of initial weights, order of data and augmentation", least=0, most=2**31 - 1)
    max_steps: int = key(0, "length of the run and of its schedule in steps; 0 = optim.epochs", least=0)
    precision: str = key(
        "float32", "what the model computes in; parameters stay float32", choices=("float32", "bfloat16")
    )
    accum_steps: int = key(1, "parts that a batch is computed in, one after the other", least=1)
    accum: str = key(
        "exact",
        "what parts mean to a loss that compares the elements of a batch: exact embeds all parts first and has the "
        "gradient of the whole batch, mean averages the gradients of parts that know nothing of each other",
        choices=("exact", "mean"),
    )
    remat: str = key(
        "none",
        "what the backward pass recomputes of each block instead of keeping it: light all but the results of "
        "convolutions and matrix products, full everything",
        choices=("none", "light", "full"),
    )
    deterministic: bool = key(
        False, "whether a GPU gives the same bits in every run, at some cost of speed; a CPU always does"
    )
    stop_on_collapse: bool = key(False, "whether to end a run whose features have collapsed, or only to warn")
    checkpoint_every_steps: int = key(0, "steps between checkpoints; 0 = by train.checkpoint_every_epochs", least=0)
    checkpoint_every_epochs: int = key(1, "epochs between checkpoints, unless they are counted in steps", least=1)
    checkpoint_keep: int = key(1, "how many checkpoints are kept", least=1)
    mirror: str = key(
        "", "where the run is copied to and fetched from if the workdir is empty, e.g. s3://bucket/run; empty = nowhere"
    )
    keep_best: str = key(
        "",
        "metric whose best state is kept: validation_loss, probe_held_out_accuracy, ...; empty = keep the last state",
    )
    patience: int = key(0, "evaluations of train.keep_best without improvement that end a run; 0 = never", least=0)
    min_delta: float = key(0.0, "smallest improvement that resets train.patience", least=0)

    def problems(self, config: "Config") -> Iterator[Problem]:
        batch = config.data.batch_size
        if batch % self.accum_steps:
            yield Problem("data.batch_size", f"not divisible by train.accum_steps = {self.accum_steps}; use a multiple")
        elif batch // self.accum_steps < 2:
            yield Problem("train.accum_steps", f"leaves one image per part of data.batch_size = {batch}; use less")
        if self.patience and not self.keep_best:
            yield Problem("train.patience", "needs train.keep_best, the metric that has to improve")


@dataclasses.dataclass(frozen=True)
class EvalConfig(Group):
    """How the encoder is evaluated."""

    weights: str = key("online", "the encoder as trained, or its slowly following copy", choices=("online", "target"))
    pool: str = key(
        "mean",
        "features: mean of all cells or patches, of each quadrant (4 x the numbers), or the CLS token",
        choices=("mean", "grid2", "cls"),
        default_from="model.pool",
    )
    every_epochs: int = key(1, "epochs between tests of the online probe; 0 = at the end only", least=0)
    every_steps: int = key(0, "steps between these tests, instead of eval.every_epochs; 0 = by epochs", least=0)
    knn_every_epochs: int = key(10, "epochs between tests of k-NN; 0 = at the end only", least=0)
    knn_k: int = key(20, "neighbours that vote", least=1)
    knn_temperature: float = key(0.07, "temperature of the votes", least=1e-6)
    calibration_images: int = key(
        0,
        "unaugmented train images that batch statistics are estimated on before evaluating; 0 = running ones",
        least=0,
    )
    untrained: bool = key(True, "whether to measure the encoder before training too")
    batch_size: int = key(256, "images per step of feature extraction", least=1)
    max_images: int = key(0, "limit for each split in k-NN and probe; 0 = all", least=0)
    most_share: float = key(
        0.4, "share of a run's operations that evaluation may take: fewer images otherwise; 0 = any", least=0, most=0.99
    )
    image_size: int = key(
        0, "pixels per side that images are evaluated at; 0 = as delivered, for a ViT the size of its views", least=0
    )
    crops: int = key(
        0,
        "features beside those of the whole image (at level 1): their mean over this many fixed crops, which have the "
        "scale and size of data.augment.crop; 0 = none",
        least=0,
    )


@dataclasses.dataclass(frozen=True)
class ProfileConfig(Group):
    """Profiling of the run."""

    enabled: bool = key(True, "whether to account for the time of every epoch and name what limits it")
    trace_every_epochs: int = key(1, "epochs between traces that split the device's time; 0 = never", least=0)
    monitor_seconds: float = key(
        1.0, "seconds between samples of processor, memory and GPUs; 0 = once per epoch", least=0
    )
    peak_tflops: float = key(
        0.0, "peak of one device, for MFU; 0 = from the table of GPUs, or measured beside the run on a CPU", least=0
    )
    plan: bool = key(True, "whether to warn if the compiled step needs more memory than JAX takes of the GPU")
    trace_steps: str = key("", "steps A to B to record for TensorBoard, as A:B; empty = none")
    trace_python: bool = key(False, "whether that trace has every call of Python, which slows its steps down")

    def problems(self, config: "Config") -> Iterator[Problem]:
        steps = re.fullmatch(r"(\d+):(\d+)", self.trace_steps)
        if self.trace_steps and (steps is None or int(steps[1]) > int(steps[2])):
            yield Problem("profile.trace_steps", "write the first and the last step as A:B, e.g. 10:15")


@dataclasses.dataclass(frozen=True)
class MeshConfig(Group):
    """How devices share the work."""

    data: int = key(-1, "devices that split the batch; -1 = all that are left", least=-1)
    fsdp: int = key(
        1,
        "devices that also split the parameters; -1 = all that are left; both -1 = those of a machine",
        least=-1,
    )

    def problems(self, config: "Config") -> Iterator[Problem]:
        for name in ("data", "fsdp"):
            if getattr(self, name) == 0:
                yield Problem(f"mesh.{name}", "use -1 for all devices that are left, or a number of devices")


@dataclasses.dataclass(frozen=True)
class LogConfig(Group):
    """Where metrics are written."""

    every_steps: int = key(20, "steps between two rows of metrics.jsonl", least=1)
    tensorboard: bool = key(True, "whether to write TensorBoard events")
    pictures_every_epochs: int = key(0, "epochs between pictures, where a method draws them; 0 = none", least=0)
    wandb_project: str = key("", "Weights & Biases project; empty = off")


@dataclasses.dataclass(frozen=True)
class NamedGroup(Group):
    """Base of the groups `method` and `model`: what they hold depends on the class that `name` refers to.

    Attributes:
      reads_images: whether a method makes views of images; if not, `data.augment` has no effect and is not checked.
      num_views: views per image that `data.augment` describes; 0 if the method cannot take them from a loader.
    """

    reads_images: ClassVar[bool] = True
    num_views: ClassVar[int] = 0

    name: str = key("", "a name that jepa_jax knows, or package.module:Class")


@dataclasses.dataclass(frozen=True)
class EncoderGroup(NamedGroup):
    """Base of the `model` groups of encoders of images."""

    init_from: str = key(
        "",
        "initial weights: a folder or .safetensors file, hub:OWNER/NAME, or the folder of a run; empty = random",
    )


COMMON: dict[str, type[Group]] = {
    "data": DataConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
    "eval": EvalConfig,
    "profile": ProfileConfig,
    "mesh": MeshConfig,
    "log": LogConfig,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that decides a run: complete, checked and immutable."""

    method: Any  # the group that the method declares
    model: Any  # the group that the encoder declares
    data: DataConfig
    optim: Any  # OptimConfig with the keys of its update rule
    train: TrainConfig
    eval: EvalConfig
    profile: ProfileConfig
    mesh: MeshConfig
    log: LogConfig

    @property
    def init_from(self) -> str:
        """Weights that the encoder starts from; "" for random ones, or for a model without this key."""
        return self.model.init_from if isinstance(self.model, EncoderGroup) else ""

    @property
    def view_groups(self) -> dict[str, ViewGroup]:
        """Further groups of views that the method takes, by name."""
        return {name: value for name, value in vars(self.method).items() if isinstance(value, ViewGroup)}

    @property
    def view_sizes(self) -> tuple[int, ...]:
        """Pixels per side of the views, each size once; that of `data.augment` first."""
        sizes = (group.crop.size or self.data.image_size for group in self.view_groups.values())
        return tuple(dict.fromkeys((self.data.view_size, *sizes)))

    @property
    def loader_crops(self) -> dict[str, Crops]:
        """What the loader cuts, by the name of the array in a batch; empty if the device cuts."""
        if self.data.crops == "device":
            return {}
        main = Crops(self.method.num_views, self.data.view_size, self.data.augment.crop)
        further = {
            crops_name(name): Crops(group.count, group.crop.size or self.data.image_size, group.crop)
            for name, group in self.view_groups.items()
        }
        return {crops_name(): main, **further}

    def to_dict(self) -> dict[str, Any]:
        """Returns nested plain dicts, as config.json holds them."""
        return nested(flatten(self))


def crops_name(group: str = "") -> str:
    """Returns the name in a batch of the crops of a group of views; without one, of those of `data.augment`."""
    return f"crops_{group}" if group else "crops"
