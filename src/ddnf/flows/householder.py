"""Householder reflections, fixed or predicted from a condition."""

from typing import Any

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flows.parameters import Parameters, ParametricBijection, condition_shape


class Householder(ParametricBijection):
    """A reflection: f(z) = z - 2 v (v.z) / |v|^2, its own inverse, of log-determinant 0.

    Tomczak and Welling, "Improving variational auto-encoders using Householder flow", 2016. There each v is
    predicted from the one before; here each from the condition.

    Args:
        key: random key of the initial v.
        dim: dimension.
        condition_dim: dimension of the condition, which predicts v; None for none.
        size: hidden units of the network that does so.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> layer = Householder(jr.key(0), 2)
        >>> y = layer.transform(jnp.array([3.0, -4.0]))
        >>> round(float(jnp.linalg.norm(y)), 4)
        5.0
    """

    def __init__(self, key: PRNGKeyArray, dim: int, *, condition_dim: int | None = None, size: int = 32):
        v_key, network_key = jr.split(key)
        initial = jr.normal(v_key, (dim,))
        self.parameters = Parameters(network_key, initial, condition_dim=condition_dim, size=size)
        self.shape, self.cond_shape = (dim,), condition_shape(condition_dim)

    def transform_and_log_det(self, x: Any, condition: Any = None):
        return reflect(x, self.parameters(condition)), jnp.zeros((), x.dtype)

    def inverse_and_log_det(self, y: Any, condition: Any = None):
        return reflect(y, self.parameters(condition)), jnp.zeros((), y.dtype)


def reflect(x: Float[Array, "dim *columns"], v: Float[Array, " dim"]) -> Float[Array, "dim *columns"]:
    """Reflects x (a vector, or the columns of a matrix) in the plane through 0 that is orthogonal to v.

    Example:
        >>> import jax.numpy as jnp
        >>> reflect(jnp.array([1.0, 2.0]), jnp.array([3.0, 0.0])).tolist()
        [-1.0, 2.0]
    """
    return x - jnp.tensordot(2 * v / (v @ v), v @ x, axes=0)
