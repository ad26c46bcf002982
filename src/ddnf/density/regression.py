"""Standardized residuals of a linear regression of the columns, and of their scales, on the conditions."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Array, Float

_WIDEST = 4.0  # bound of the log of a predicted standard deviation, for conditions far from all others
_CLIP = 10.0  # standard units; values farther out do not count more
_LOG_CHI_SQUARE = -1.2704  # mean of the log of the square of a standard normal number


class Regression(AbstractBijection):
    """x -> (x - a - A c) exp(-s(b + B c)) for a condition c, where s(t) = w tanh(t / w) bounds the logarithm.

    Args:
        dim: number of columns.
        condition_dim: number of conditions.

    Example:
        >>> import jax.numpy as jnp
        >>> Regression(2, 1).transform(jnp.array([0.5, -7.0]), jnp.ones(1)).tolist()  # the identity, until it is fitted
        [0.5, -7.0]
    """

    shift: Float[Array, " dim"]
    shift_weights: Float[Array, "dim condition"]
    log_scale: Float[Array, " dim"]
    log_scale_weights: Float[Array, "dim condition"]
    shape: tuple[int, ...] = eqx.field(static=True)
    cond_shape: tuple[int, ...] | None = eqx.field(static=True)

    def __init__(self, dim: int, condition_dim: int):
        real = jnp.result_type(float)
        self.shift = self.log_scale = jnp.zeros(dim, real)
        self.shift_weights = self.log_scale_weights = jnp.zeros((dim, condition_dim), real)
        self.shape, self.cond_shape = (dim,), (condition_dim,)

    def transform_and_log_det(self, x: Any, condition: Any = None):
        shift, log_scale = self._at(condition)
        return (x - shift) * jnp.exp(-log_scale), -jnp.sum(log_scale)

    def inverse_and_log_det(self, y: Any, condition: Any = None):
        shift, log_scale = self._at(condition)
        return y * jnp.exp(log_scale) + shift, jnp.sum(log_scale)

    def _at(self, condition: Any) -> tuple[Array, Array]:
        raw = self.log_scale + self.log_scale_weights @ condition
        return self.shift + self.shift_weights @ condition, _WIDEST * jnp.tanh(raw / _WIDEST)


def fit_regression(
    rows: Float[np.ndarray, "n dim"], given: Float[np.ndarray, "n condition"], *, has_scale: bool
) -> Regression:
    """Weights by ridge regression of standardized rows, and of the logarithms of the squares that it leaves.

    Args:
        rows, given: standardized.
        has_scale: whether deviations depend on the condition too.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> c = rng.normal(size=(500, 1))
        >>> found = fit_regression(2 * c + 0.1 * rng.normal(size=(500, 1)), c, has_scale=False)
        >>> bool(abs(found.shift_weights[0, 0] - 2) < 0.02)
        True
    """
    shift, weights = _ridge(np.clip(rows, -_CLIP, _CLIP), given, 1.0)
    left = np.clip(rows - shift - given @ weights.T, -_CLIP, _CLIP)
    log_scale, scale_weights = np.zeros(len(shift)), np.zeros_like(weights)
    if has_scale:
        # Logarithms of squares have a deviation of 2.2 around twice the logarithm of the deviation.
        log_squares = np.log(left**2 + 1e-6) - _LOG_CHI_SQUARE
        log_scale, scale_weights = _ridge(log_squares / 2, given, 5.0)
    regression = Regression(*weights.shape)
    fitted = shift, weights, log_scale, scale_weights
    arrays = regression.shift, regression.shift_weights, regression.log_scale, regression.log_scale_weights
    new = [jnp.asarray(value, array.dtype) for value, array in zip(fitted, arrays, strict=True)]
    return eqx.tree_at(lambda r: (r.shift, r.shift_weights, r.log_scale, r.log_scale_weights), regression, new)


def _ridge(y, given, strength):
    """Constant and weights of a ridge regression, with a penalty equivalent to `strength` standardized rows."""
    mean, centre = y.mean(axis=0), given.mean(axis=0)
    c = given - centre
    weights = np.linalg.solve(c.T @ c + strength * np.eye(c.shape[1]), c.T @ (y - mean)).T
    return mean - weights @ centre, weights


def residuals(
    regression: Regression, rows: Float[np.ndarray, "n dim"], given: Float[np.ndarray, "n condition"]
) -> tuple[Float[np.ndarray, "n dim"], Float[np.ndarray, " n"]]:
    """Rows through a regression, and the log-determinants: in NumPy, which needs no compilation.

    Example:
        >>> residuals(Regression(1, 1), np.array([[0.5]]), np.ones((1, 1)))[0].tolist()
        [[0.5]]
    """
    arrays = regression.shift, regression.shift_weights, regression.log_scale, regression.log_scale_weights
    shift, weights, log_scale, scale_weights = (np.asarray(array, float) for array in arrays)
    bounded = _WIDEST * np.tanh((log_scale + given @ scale_weights.T) / _WIDEST)
    return (rows - shift - given @ weights.T) * np.exp(-bounded), -bounded.sum(axis=1)
