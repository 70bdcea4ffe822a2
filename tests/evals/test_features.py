"""Chance and classes that a split lacks."""

import numpy as np

from jepa_jax.evals.features import Split, chance, class_notes


def split_of(*counts):
    """Returns a split with this many images of each class."""
    labels = np.repeat(np.arange(len(counts)), counts)
    return Split(np.zeros((len(labels), 1), np.float32), labels)


def test_chance_is_that_of_guessing_or_of_the_commonest_class():
    assert chance(split_of(5, 5, 5, 5), split_of(3, 3, 3, 3), 4) == 25
    assert chance(split_of(1, 9), split_of(2, 6), 2) == 75
    assert chance(split_of(9, 1), split_of(2, 6), 2) == 50  # commonest in train, rare in test: guessing is better
    assert chance(split_of(5), split_of(5), 1) == 100


def test_missing_classes_are_named():
    classes = ("cat", "dog", "owl")
    assert class_notes(split_of(2, 2, 2), split_of(1, 1, 1), classes) == []
    (note,) = class_notes(split_of(2, 2, 2), split_of(1, 0, 1), classes)
    assert note.startswith("The test images have 2 of 3 classes (missing: dog)")
    assert class_notes(split_of(0, 4), split_of(0, 2), classes) == [
        "All images are of one class, dog: no accuracy is measured."
    ]
    many = class_notes(split_of(*[1] * 20), split_of(1, 1), [str(i) for i in range(20)])
    assert "(missing: 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 8 more)" in many[0]
