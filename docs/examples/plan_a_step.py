"""Plans a training step of a plain JAX program for GPUs that this machine does not have.

    pip install 'jepa_jax[plan]'
    python docs/examples/plan_a_step.py

Prints whether the step fits, its predicted time, what is alive at the peak and the slowest kernels: on one RTX 4090,
and with the batch divided over eight A100s. Nothing is computed; no GPU is needed.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jepa_jax.planning import plan

WIDTH, DEPTH, BATCH = 2048, 6, 16384


def loss(params: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    for weights in params:
        x = jax.nn.gelu(x @ weights)
    return jnp.mean((x - y).astype(jnp.float32) ** 2)


def step(params: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    value, gradients = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda weights, gradient: weights - 0.1 * gradient, params, gradients), value


if __name__ == "__main__":
    train_step = jax.jit(step, donate_argnums=0)  # the parameters are updated in place
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * DEPTH  # arrays work as well
    batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16)
    print(plan(train_step, params, batch, batch, gpu="rtx4090", samples=BATCH))

    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))  # or a mesh of eight devices
    divided = batch.update(sharding=NamedSharding(mesh, P("data")))
    eight = plan(train_step, params, divided, divided, gpu="a100-80", samples=BATCH)
    print(f"\n{eight.devices} x {eight.gpu.name}: {eight.verdict}, {1e3 * eight.prediction.seconds:.2f} ms per step")
