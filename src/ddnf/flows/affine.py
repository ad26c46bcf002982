"""Affine maps, conditional or not: mean-field and full-rank Gaussians."""

from typing import Any

import jax.numpy as jnp
from jax.nn import softplus
from jax.scipy.linalg import solve_triangular
from jaxtyping import PRNGKeyArray

from ddnf.flows.parameters import UNIT, Parameters, ParametricBijection, condition_shape


class DiagonalAffine(ParametricBijection):
    """f(z) = scale * z + shift, elementwise, both predicted from the condition if there is one.

    Args:
        key: random key of the network from the condition.
        dim: dimension.
        condition_dim: dimension of the condition; None for none.
        size: hidden units of the network from the condition.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> DiagonalAffine(jr.key(0), 2).transform(jnp.array([1.0, -2.0])).round(5).tolist()
        [1.0, -2.0]
    """

    def __init__(self, key: PRNGKeyArray, dim: int, *, condition_dim: int | None = None, size: int = 32):
        initial = jnp.concatenate([jnp.zeros(dim), jnp.full(dim, UNIT)])
        self.parameters = Parameters(key, initial, condition_dim=condition_dim, size=size)
        self.shape, self.cond_shape = (dim,), condition_shape(condition_dim)

    def transform_and_log_det(self, x: Any, condition: Any = None):
        shift, scale = self._at(condition)
        return scale * x + shift, jnp.sum(jnp.log(scale))

    def inverse_and_log_det(self, y: Any, condition: Any = None):
        shift, scale = self._at(condition)
        return (y - shift) / scale, -jnp.sum(jnp.log(scale))

    def _at(self, condition):
        shift, raw = jnp.split(self.parameters(condition), 2)
        return shift, softplus(raw)


class FullAffine(ParametricBijection):
    """f(z) = L z + shift with L lower triangular, both predicted from the condition if there is one.

    The arguments are those of `DiagonalAffine`.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> FullAffine(jr.key(0), 2).transform(jnp.array([1.0, -2.0])).round(5).tolist()
        [1.0, -2.0]
    """

    def __init__(self, key: PRNGKeyArray, dim: int, *, condition_dim: int | None = None, size: int = 32):
        initial = jnp.concatenate([jnp.zeros(dim), jnp.full(dim, UNIT), jnp.zeros(dim * (dim - 1) // 2)])
        self.parameters = Parameters(key, initial, condition_dim=condition_dim, size=size)
        self.shape, self.cond_shape = (dim,), condition_shape(condition_dim)

    def transform_and_log_det(self, x: Any, condition: Any = None):
        shift, matrix = self._at(condition)
        return matrix @ x + shift, jnp.sum(jnp.log(jnp.diag(matrix)))

    def inverse_and_log_det(self, y: Any, condition: Any = None):
        shift, matrix = self._at(condition)
        return solve_triangular(matrix, y - shift, lower=True), -jnp.sum(jnp.log(jnp.diag(matrix)))

    def _at(self, condition):
        dim = self.shape[0]
        shift, raw, below = jnp.split(self.parameters(condition), [dim, 2 * dim])
        return shift, jnp.diag(softplus(raw)).at[jnp.tril_indices(dim, -1)].set(below)
