"""A fixed triangular map that whitens rows. It can be pickled and saved, and needs no solve in training."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float


class Whitening(AbstractBijection):
    """x -> A x + b with a lower triangular A; neither is trained.

    Args:
        shift: b.
        matrix: A.

    Example:
        >>> import jax.numpy as jnp
        >>> Whitening(np.ones(2), 2 * np.eye(2)).transform(jnp.ones(2)).tolist()
        [3.0, 3.0]
    """

    shift: Float[Array, " dim"]
    matrix: Float[Array, "dim dim"]
    shape: tuple[int, ...] = eqx.field(static=True)
    cond_shape: tuple[int, ...] | None = eqx.field(static=True)

    def __init__(self, shift: Float[np.ndarray, " dim"], matrix: Float[np.ndarray, "dim dim"]):
        self.shift, self.matrix = (jnp.asarray(a, jnp.result_type(float)) for a in (shift, matrix))
        self.shape = (len(shift),)
        self.cond_shape = None

    def transform_and_log_det(self, x, condition=None):
        matrix, shift = self._fixed()
        return matrix @ x + shift, jnp.sum(jnp.log(jnp.diag(matrix)))

    def inverse_and_log_det(self, y, condition=None):
        matrix, shift = self._fixed()
        return solve_triangular(matrix, y - shift, lower=True), -jnp.sum(jnp.log(jnp.diag(matrix)))

    def _fixed(self):
        return lax.stop_gradient((self.matrix, self.shift))
