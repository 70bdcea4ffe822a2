"""The figure by which runs, rates, recipes and checkpoints are chosen."""

# Key of summary.json: accuracy of the linear probe on a held-out part of the *training* images, in percent. What is
# chosen by the test accuracy has a test accuracy that is too good, so nothing in this package sorts by that one.
SELECTION_KEY = "probe_held_out_accuracy"
# Where there are no labels: the loss of what `data.validation` holds out of training.
VALIDATION_LOSS = "validation_loss"
