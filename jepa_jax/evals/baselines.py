"""What needs no learning at all: the accuracies that stand beside every result of ours."""

# Ridge regression on CIFAR-10, test accuracy in percent; `python profiling/bench_baselines.py` measures them again.
CIFAR10 = {
    "raw pixels": 41.0,
    "untrained whitened patches, pooled to 512 numbers": 56.5,
}


def published_baselines(source: str) -> dict[str, float]:
    """Baselines of a data source by name; empty where none was measured."""
    return dict(CIFAR10) if source in ("cifar10", "tfds:cifar10") else {}
