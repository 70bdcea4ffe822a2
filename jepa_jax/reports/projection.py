"""Projections of features for figures: PCA, exact t-SNE, and patch features as colours."""

import jax
import jax.numpy as jnp
import numpy as np

PERPLEXITY = 30.0
ITERATIONS, EXAGGERATED = 600, 150
SEARCHES = 40  # bisections of the width of each point's kernel


def pca(features: np.ndarray, components: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Returns coordinates [N, components] and the share of the variance that each component holds."""
    x = np.asarray(features, np.float64)
    x = x - x.mean(axis=0)
    eigenvalues, vectors = np.linalg.eigh(x.T @ x)
    order = np.argsort(eigenvalues)[::-1][:components]
    total = max(float(eigenvalues.sum()), 1e-300)
    return x @ vectors[:, order], eigenvalues[order] / total


def tsne(features: np.ndarray, perplexity: float = PERPLEXITY) -> np.ndarray:
    """Returns the exact t-SNE [N, 2] of about a thousand points or fewer (van der Maaten and Hinton 2008)."""
    perplexity = min(perplexity, (len(features) - 1) / 3)
    x = np.asarray(features, np.float32)
    # Fifty principal components keep the relevant distances and make them cheap; the first two are the start.
    x = pca(x, min(50, x.shape[1]))[0].astype(np.float32)
    start = x[:, :2] / max(float(x[:, 0].std()), 1e-12) * 1e-4
    if start.shape[1] < 2:
        start = np.pad(start, ((0, 0), (0, 2 - start.shape[1])))
    return np.asarray(_tsne(jnp.asarray(x), jnp.asarray(start), perplexity))


@jax.jit
def _tsne(x: jax.Array, start: jax.Array, perplexity: float) -> jax.Array:
    count = len(x)
    affinity = _affinities(x, perplexity)
    affinity = jnp.maximum((affinity + affinity.T) / (2 * count), 1e-12)
    rate = jnp.maximum(count / 12.0 / 4.0, 50.0)

    def iterate(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        y, velocity, gains = carry
        exaggeration, momentum = jnp.where(i < EXAGGERATED, 12.0, 1.0), jnp.where(i < EXAGGERATED, 0.5, 0.8)
        kernel = 1 / (1 + _squared_distances(y))
        kernel = kernel - jnp.diag(jnp.diag(kernel))
        force = (exaggeration * affinity - kernel / jnp.sum(kernel)) * kernel
        gradient = 4 * (jnp.sum(force, axis=1)[:, None] * y - force @ y)
        gains = jnp.where(jnp.sign(gradient) != jnp.sign(velocity), gains + 0.2, gains * 0.8)
        gains = jnp.maximum(gains, 0.01)
        velocity = momentum * velocity - rate * gains * gradient
        y = y + velocity
        return y - jnp.mean(y, axis=0), velocity, gains

    return jax.lax.fori_loop(0, ITERATIONS, iterate, (start, jnp.zeros_like(start), jnp.ones_like(start)))[0]


def _squared_distances(x: jax.Array) -> jax.Array:
    squares = jnp.sum(x * x, axis=1)
    return jnp.maximum(squares[:, None] + squares[None] - 2 * x @ x.T, 0.0)


def _affinities(x: jax.Array, perplexity: float) -> jax.Array:
    """Returns rows of Gaussian weights with entropy log(perplexity), found by bisecting the logarithm of the width."""
    distance = _squared_distances(x)
    distance = distance / jnp.maximum(jnp.mean(distance), 1e-12)
    off_diagonal = 1 - jnp.eye(len(x))

    def weights(log_beta: jax.Array) -> jax.Array:
        logits = -distance * jnp.exp(log_beta)[:, None]
        logits = jnp.where(off_diagonal > 0, logits, -jnp.inf)
        return jax.nn.softmax(logits, axis=1)

    def bisect(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) / 2
        p = weights(middle)
        entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.maximum(p, 1e-30)), 0.0), axis=1)
        too_wide = entropy > jnp.log(perplexity)
        return jnp.where(too_wide, middle, low), jnp.where(too_wide, high, middle)

    bounds = jnp.full(len(x), -10.0), jnp.full(len(x), 15.0)
    low, high = jax.lax.fori_loop(0, SEARCHES, bisect, bounds)
    return weights((low + high) / 2)


def patch_colours(maps: np.ndarray) -> np.ndarray:
    """Returns the three principal components of patch features [B, gh, gw, F] as colours, uint8 [B, gh, gw, 3].

    The components are those of all images together, so that a colour means the same in each of them.
    """
    coordinates, _ = pca(maps.reshape(-1, maps.shape[-1]), 3)
    low, high = np.percentile(coordinates, (2, 98), axis=0)
    unit = np.clip((coordinates - low) / np.maximum(high - low, 1e-12), 0, 1)
    colours = np.zeros((len(unit), 3))
    colours[:, : unit.shape[1]] = unit
    return (255 * colours + 0.5).astype(np.uint8).reshape(*maps.shape[:3], 3)
