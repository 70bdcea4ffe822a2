"""Batch statistics of unaugmented images.

An encoder that is trained on small crops has running statistics of crops, but it is used on whole images.
"""

from typing import Any

import jax
import numpy as np

from jepa_jax.data.contract import Source
from jepa_jax.evals.features import OnCount, ignore
from jepa_jax.evals.inference import EncoderFunctions
from jepa_jax.methods.contract import Batch
from jepa_jax.program.step import with_statistics
from jepa_jax.runtime.mesh import batch_sharding


def calibrated(
    functions: EncoderFunctions,
    variables: tuple[Any, Any],
    source: Source,
    *,
    num_images: int,
    batch_size: int,
    on_images: OnCount = ignore,
) -> tuple[Any, Any]:
    """Returns (params, stats) with batch statistics averaged over `num_images` of `source`; 0 changes nothing."""
    params, stats = variables
    devices = functions.program.mesh.size
    batch_size = min(batch_size, len(source)) // devices * devices
    if num_images == 0 or batch_size == 0 or not jax.tree.leaves(stats):
        return variables
    seen = []
    for start in range(0, num_images, batch_size):
        batch = _placed(functions, source, np.arange(start, start + batch_size) % len(source))
        seen.append(functions.statistics(params, stats, batch))
        on_images(batch_size)
    mean = jax.tree.map(lambda *leaves: leaves[0] if len(leaves) == 1 else sum(leaves) / len(leaves), *seen)
    return params, with_statistics(stats, mean)


def _placed(functions: EncoderFunctions, source: Source, indices: np.ndarray) -> Batch:
    """Returns a batch laid out on the mesh, of which each process loads its part."""
    sharding = batch_sharding(functions.program.mesh)
    own = np.split(indices, jax.process_count())[jax.process_index()]
    loaded = source.batch(own)
    return {name: jax.make_array_from_process_local_data(sharding, loaded[name]) for name in source.spec}
