"""What accuracies stand beside: baselines that need no learning, and notes about classes that a split lacks."""

from collections.abc import Sequence

import numpy as np

from jepa_jax.evals.features import Split, labels_differ

NAMED_CLASSES = 5  # of those that are missing
# Ridge regression on all of CIFAR-10, test accuracy in percent, measured with profiling/bench_baselines.py.
CIFAR10_BASELINES = {
    "raw pixels": 39.4,
    "untrained whitened patches, pooled to 512 numbers": 60.6,
}


def measured_baselines(source: str) -> dict[str, float]:
    """Returns accuracies on a data source that need no learning, by name; empty if none were measured."""
    return dict(CIFAR10_BASELINES) if source in ("cifar10", "tfds:cifar10") else {}


def class_notes(train: Split, test: Split, classes: Sequence[str]) -> list[str]:
    """Returns sentences about classes that the train or the test images lack."""
    if not labels_differ(train, test):
        return [f"All images are of one class, {classes[train.labels[0]]}: no accuracy is measured."]
    notes = []
    for name, split in (("train", train), ("test", test)):
        present = np.unique(split.labels)
        missing = [label for index, label in enumerate(classes) if index not in present]
        if missing:
            named = ", ".join(missing[:NAMED_CLASSES]) + (", ..." if len(missing) > NAMED_CLASSES else "")
            notes.append(
                f"The {name} images have {len(present)} of {len(classes)} classes (missing: {named}): accuracies say "
                "nothing about the others."
            )
    return notes
