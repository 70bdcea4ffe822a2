"""Names of what a run spends its time on: on the host, on the device, and of an epoch as a whole."""

import enum


class EpochSection(enum.StrEnum):
    """Parts of an epoch's wall time, as the metrics name them; together they are the whole epoch."""

    FORWARD_PASS = "forward_pass"
    BACKWARD_PASS = "backward_pass"
    AUGMENT = "augment"
    OPTIMIZER_STEP = "optimizer_step"
    EMA_UPDATE = "ema_update"
    DATA_WAIT = "data_wait"
    DATA_TRANSFER = "data_transfer"
    VALIDATION_EPOCH = "validation_epoch"
    VISUALIZATION_GENERATION = "visualization_generation"
    CHECKPOINT = "checkpoint"
    COMPILE = "compile"
    OTHER = "other"


class Section(enum.StrEnum):
    """What the host does; exactly one at any time."""

    DATA_WAIT = "data_wait"
    DISPATCH = "dispatch"
    DEVICE_WAIT = "device_wait"
    LOGGING = "logging"
    VALIDATION = "validation"
    VISUALIZATION = "visualization"
    CHECKPOINT = "checkpoint"
    COMPILE = "compile"
    PROFILER = "profiler"
    OTHER = "other"

    @property
    def epoch_section(self) -> EpochSection:
        """The part of the epoch that this section counts for while the device is idle."""
        return _OF_HOST.get(self, EpochSection.OTHER)


class Phase(enum.StrEnum):
    """What the device does in a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    AUGMENT = "augment"
    OPTIMIZER = "optimizer"
    EMA = "ema"
    OTHER = "other"

    @property
    def epoch_section(self) -> EpochSection:
        """The part of the epoch that this phase counts for."""
        return _OF_DEVICE[self]


# Time that belongs to steps: not compilations, evaluations, pictures, checkpoints or the profiler's own work.
STEP_SECTIONS = (Section.DATA_WAIT, Section.DISPATCH, Section.DEVICE_WAIT, Section.LOGGING, Section.OTHER)
# Named parts of EpochSection.OTHER.
OVERHEADS = (Section.DISPATCH, Section.DEVICE_WAIT, Section.LOGGING, Section.PROFILER, Section.OTHER)
# What happens between steps.
BETWEEN_STEPS = (
    EpochSection.VALIDATION_EPOCH,
    EpochSection.VISUALIZATION_GENERATION,
    EpochSection.CHECKPOINT,
    EpochSection.COMPILE,
)
_OF_HOST = {
    Section.DATA_WAIT: EpochSection.DATA_WAIT,
    Section.VALIDATION: EpochSection.VALIDATION_EPOCH,
    Section.VISUALIZATION: EpochSection.VISUALIZATION_GENERATION,
    Section.CHECKPOINT: EpochSection.CHECKPOINT,
    Section.COMPILE: EpochSection.COMPILE,
}
_OF_DEVICE = {
    Phase.FORWARD: EpochSection.FORWARD_PASS,
    Phase.BACKWARD: EpochSection.BACKWARD_PASS,
    Phase.AUGMENT: EpochSection.AUGMENT,
    Phase.OPTIMIZER: EpochSection.OPTIMIZER_STEP,
    Phase.EMA: EpochSection.EMA_UPDATE,
    Phase.OTHER: EpochSection.OTHER,
}
