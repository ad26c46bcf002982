"""Activations of the velocity fields: value, slope, and a bound on the absolute slope, by name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array


def _tanh(a):
    h = jnp.tanh(a)
    return h, 1 - h * h


def _softplus(a):
    return jax.nn.softplus(a), jax.nn.sigmoid(a)


def _swish(a):
    gate = jax.nn.sigmoid(a)
    return a * gate, gate * (1 + a * (1 - gate))


def _gelu(a):
    below = jax.scipy.stats.norm.cdf(a)
    return a * below, below + a * jax.scipy.stats.norm.pdf(a)


def _sin(a):
    return jnp.sin(a), jnp.cos(a)


# For each name: a -> (value, slope), and the largest absolute slope.
ACTIVATIONS: dict[str, tuple[Callable[[Array], tuple[Array, Array]], float]] = {
    "tanh": (_tanh, 1.0),
    "softplus": (_softplus, 1.0),
    "swish": (_swish, 1.09984),
    "gelu": (_gelu, 1.12905),
    "sin": (_sin, 1.0),
}
