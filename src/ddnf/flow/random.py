"""Random numbers: standard normal draws and their log density, and NumPy's generators from JAX keys."""

from math import prod

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray


def normals(key: PRNGKeyArray, n: int, shape: tuple[int, ...]) -> Float[Array, "n *shape"]:
    """n draws of a standard normal, the same as by `jr.normal`.

    They are drawn in one row: with few dimensions in the last axis the compiler takes four times as long.

    Example:
        >>> import jax.random as jr
        >>> bool((normals(jr.key(0), 5, (3,)) == jr.normal(jr.key(0), (5, 3))).all())
        True
    """
    return jr.normal(key, (n * prod(shape),)).reshape(n, *shape)


def normal_log_prob(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch"]:
    """The log density of a standard normal, over the last axis.

    Example:
        >>> import jax.numpy as jnp
        >>> round(float(normal_log_prob(jnp.zeros(2))), 4)
        -1.8379
    """
    return -jnp.sum(x**2, axis=-1) / 2 - x.shape[-1] / 2 * jnp.log(2 * jnp.pi)


def generator(key: PRNGKeyArray) -> np.random.Generator:
    """NumPy's random numbers from a JAX key, for what runs on the host: JAX would compile each shape."""
    return np.random.default_rng(np.asarray(jr.key_data(key)))
