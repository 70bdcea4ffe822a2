"""Accuracies that need no learning, to show beside the results of runs."""

# Ridge regression on all of CIFAR-10, test accuracy in percent, measured with profiling/bench_baselines.py.
CIFAR10 = {
    "raw pixels": 39.4,
    "untrained whitened patches, pooled to 512 numbers": 60.6,
}


def measured_baselines(source: str) -> dict[str, float]:
    """Returns our own measurements on a data source, by name; empty if there are none."""
    return dict(CIFAR10) if source in ("cifar10", "tfds:cifar10") else {}
