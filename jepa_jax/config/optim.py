"""Keys of the optimizer: update rules, schedules and length."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jepa_jax.config.schema import PROBABILITY, Group, Problem, key

if TYPE_CHECKING:
    from jepa_jax.config.groups import Config


@dataclasses.dataclass(frozen=True)
class LarcKeys(Group):
    momentum: float = key(0.9, "momentum", **PROBABILITY)
    larc_trust: float = key(0.02, "trust coefficient", least=0)
    larc_clip: bool = key(True, "whether no step is longer than that of plain SGD (LARC); False is LARS")


@dataclasses.dataclass(frozen=True)
class DecayKeys(Group):
    weight_decay_end: float = key(
        0.0, "weight decay at the last step, reached by half a cosine", least=0, default_from="optim.weight_decay"
    )


@dataclasses.dataclass(frozen=True)
class AdamwKeys(DecayKeys):
    """Decay rates of the moments of AdamW."""

    beta1: float = key(0.9, "decay of the first moment", **PROBABILITY)
    beta2: float = key(0.999, "decay of the second moment", **PROBABILITY)


@dataclasses.dataclass(frozen=True)
class SgdKeys(DecayKeys):
    momentum: float = key(0.9, "momentum", **PROBABILITY)
    nesterov: bool = key(False, "whether momentum looks ahead")


@dataclasses.dataclass(frozen=True)
class MuonKeys(AdamwKeys):
    """Kernels are updated by Muon; biases, norms, tokens and positions by AdamW, whose betas are those of AdamwKeys."""

    momentum: float = key(0.95, "momentum of kernels, before they are orthogonalised", **PROBABILITY)
    nesterov: bool = key(True, "whether momentum looks ahead")
    ns_steps: int = key(5, "Newton-Schulz iterations that orthogonalise an update", least=1, most=20)
    update_rms: float = key(0.2, "root mean square of a kernel's update at rate 1; 0.2 is typical of AdamW", least=1e-6)
    adam_lr_factor: float = key(1.0, "learning-rate factor for biases, norms and tokens", least=0)


@dataclasses.dataclass(frozen=True)
class ScheduleFreeKeys(Group):
    """The rate stays at its peak after the warm-up; evaluations read an average of the iterates."""

    beta1: float = key(
        0.9, "point between newest iterate (0) and average (1) at which gradients are taken", least=0.01, most=1
    )
    beta2: float = key(0.999, "decay of the second moment", **PROBABILITY)

    def problems(self, config: "Config") -> Iterator[Problem]:
        if config.optim.end_lr:
            yield Problem("optim.end_lr", "schedule_free_adamw averages instead of decaying its rate; leave it at 0")
        if config.optim.schedule not in ("cosine", "constant"):
            yield Problem("optim.schedule", "schedule_free_adamw averages instead of decaying its rate; use constant")


@dataclasses.dataclass(frozen=True)
class WsdKeys(Group):
    """Warm-up, stable, decay: the rate stays at its peak until a straight line takes it to `optim.end_lr`."""

    decay_fraction: float = key(0.1, "fraction of the run, at its end, in which the rate decays", **PROBABILITY)


@dataclasses.dataclass(frozen=True)
class OptimConfig(Group):
    """Update rule, schedule and length."""

    name: str = key(
        "adamw",
        "update rule; or package.module:function of your own",
        outside=True,
        variants={
            "larc": LarcKeys,
            "adamw": AdamwKeys,
            "sgd": SgdKeys,
            "muon": MuonKeys,
            "schedule_free_adamw": ScheduleFreeKeys,
        },
    )
    lr: float = key(1e-3, "peak rate at the reference batch", least=0)
    weight_decay: float = key(0.05, "weight decay of kernels at the first step", least=0)
    decay_all: bool = key(False, "whether biases, norms, tokens and positions decay too, and are scaled by LARC")
    epochs: float = key(10.0, "passes over the train split", least=0)
    warmup_epochs: float = key(1.0, "linear warm-up, from the first step on", least=0)
    warmup_lr: float = key(1e-6, "rate of the first step", least=0)
    end_lr: float = key(0.0, "rate at the end of the schedule; without effect if it is constant", least=0)
    schedule: str = key(
        "cosine",
        "how the rate goes on after the warm-up; or package.module:function of your own; a finished run can be "
        "continued to more epochs if it is constant or wsd",
        outside=True,
        variants={"cosine": None, "linear": None, "constant": None, "wsd": WsdKeys},
    )
    batch_scaling: str = key("none", "how lr grows with the batch", choices=("none", "linear", "sqrt"))
    reference_batch: int = key(1, "batch that lr is meant for", least=1, default_from="data.batch_size")
    clip_norm: float = key(0.0, "largest norm of the gradient; 0 = no limit", least=0)
    layer_decay: float = key(
        1.0,
        "learning-rate factor from each block of the encoder to the one before it; 1 = equal rates; for encoders that "
        "start from trained weights",
        least=0.01,
        most=1,
    )
    probe_lr: float = key(1e-3, "rate of the online probe (AdamW, cosine)", least=0)
    probe_weight_decay: float = key(0.0, "weight decay of the online probe", least=0)

    def problems(self, config: "Config") -> Iterator[Problem]:
        if self.decay_all and self.name == "muon":
            yield Problem("optim.decay_all", "muon takes what decays for matrices; use adamw, or leave it off")
        if config.train.max_steps:
            return
        if self.epochs == 0:
            yield Problem("optim.epochs", "nothing to train; set it above 0, or set train.max_steps")
        elif self.warmup_epochs > self.epochs:
            yield Problem("optim.warmup_epochs", f"longer than optim.epochs = {self.epochs}; shorten it")
