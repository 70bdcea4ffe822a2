"""Records of epochs and samples of the machine with known figures."""

from collections.abc import Mapping, Sequence

from jepa_jax.profiling.accounting import account
from jepa_jax.profiling.epoch_record import Block, EpochRecord, Observed, make_record
from jepa_jax.profiling.monitor import Sample
from jepa_jax.profiling.sections import STEP_SECTIONS, Phase, Section

SHARES = {Phase.FORWARD: 0.3, Phase.BACKWARD: 0.6, Phase.OPTIMIZER: 0.05, Phase.AUGMENT: 0.05}


def sample(
    step: int = 0, ram: float = 40.0, process: float = 2.0, gpus: Sequence[Mapping[str, float | None]] = ()
) -> Sample:
    """Returns a sample of the monitor; `ram` in percent, `process` in GiB."""
    return {
        "time": float(step), "step": step, "cpu_percent": 50.0, "process_cpu_percent": 90.0, "ram_percent": ram,
        "ram_available_gb": 16.0, "process_ram_gb": process, "gpus": list(gpus),
    }  # fmt: skip


def record(
    host: Mapping[Section, float] | None = None,
    *,
    device: float = 100.0,
    epoch: int = 2,
    transfer: float = 0.0,
    samples: Sequence[Sample] = (),
    compilations: int = 0,
) -> EpochRecord:
    """Returns an epoch of 100 steps in which the device computed for `device` seconds, then idled during `host`."""
    at, segments = device, [(Section.DEVICE_WAIT, 0.0, device)]
    for section, seconds in (host or {}).items():
        segments.append((section, at, at + seconds))
        at += seconds
    stepping = sum(end - start for section, start, end in segments if section in STEP_SECTIONS)
    block = Block(100, account(segments, [(0.0, device)]), [stepping / 100] * 100)
    loading = {"loaded": 100, "generation": 50.0, "supply": 100 * (1 - transfer), "transfer": 100 * transfer}
    return make_record(
        Observed([block], **loading, compilations=compilations, traced=True), epoch=epoch, last_step=100,
        shares=SHARES, batch_size=64, flops_per_step=1e12, peak_flops=10e12, samples=samples or [sample()],
    )  # fmt: skip
