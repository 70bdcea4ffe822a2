"""Layers with one formulation per platform, and gradients of their own for reverse mode (`jax.grad`, `jax.vjp`).

JAX cannot push tangents through a function with a gradient of its own. Inside `forward_mode()` the layers are traced as
plain operations instead, which `jax.jvp`, `jax.jacfwd` and `jax.linearize` take.

Example:
  with forward_mode():
      features, tangent = jax.jvp(encoder, (images,), (direction,))
"""

from jepa_jax.base.scope import Scope

forward_mode = Scope("forward_mode")
# The scope in which exported programs are traced, which run without this package.
without_gpu_kernels = Scope("without_gpu_kernels")
