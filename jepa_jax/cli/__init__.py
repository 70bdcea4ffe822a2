"""The sub-commands of `jepa-jax`: flags in, one call, an exit code out."""

import multiprocessing

from jepa_jax.runtime.platforms import import_jax

if multiprocessing.current_process().name != "MainProcess":
    # A data worker imports the file of the command first, then the source, which imports jax with remarks about GPUs.
    import_jax()
