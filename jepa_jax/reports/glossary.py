"""Says in plain words what the figures on pages mean, and which values are good."""

from collections.abc import Iterable

from jepa_jax.reports.parts import Card, Section, pairs

# Beginning of a label -> its meaning.
MEANINGS = {
    "Linear probe": "accuracy of a linear classifier, solved on frozen features of labelled train images; higher is "
    "better. Compare it with that of the untrained encoder.",
    "Online probe": "a linear classifier that is trained along with the encoder, without influence on it; lags behind.",
    "Held-out": "train images kept aside; settings are chosen on them, so that the test images stay untouched.",
    "k-NN": "accuracy of a vote of the nearest train images in feature space; needs no training at all.",
    "Few-shot": "accuracy with 1, 5 or 10 labelled images per class, nearest class mean.",
    "Fine-tuned": "accuracy after the whole encoder was trained on labels.",
    "Chance": "what guessing or the commonest class reaches: the floor.",
    "Effective rank": "how many directions the features use, from 1 to their number; a fall during training towards 1 "
    "is a collapse. It compares runs with equally many features.",
    "RankMe": "the effective rank of features that are not centred; higher is usually better among similar runs.",
    "LiDAR": "how many directions tell images apart although their augmented views vary; higher is usually better.",
    "alpha-ReQ": "how fast the spectrum of the features falls; near 1 is good, above 2 few directions dominate.",
    "Alignment": "mean squared distance of two views of one image, 0 to 4; small is good if uniformity is low.",
    "Uniformity": "how evenly features fill the sphere: 0 if all are alike, -4 if spread evenly over many dimensions.",
    "Collapse": "whether features became alike or fell into few directions; then the encoder is of no use.",
    "Speed": "images, or other elements, of training per second, without evaluation and checkpoints.",
    "MFU": "share of the device's peak that matrix products and convolutions reach.",
}


def meaning(label: str) -> str:
    """Returns what a figure means; "" for a label that names none."""
    return next((text for name, text in MEANINGS.items() if name.lower() in label.lower()), "")


def glossary(labels: Iterable[str]) -> Section:
    """Returns a section that explains those figures of a page that have a meaning here."""
    shown = [label.lower() for label in labels]
    rows = [[name, text] for name, text in MEANINGS.items() if any(name.lower() in label for label in shown)]
    return Section("What the figures mean", [Card("", [pairs(rows)])] if rows else [])
