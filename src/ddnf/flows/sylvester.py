"""The Sylvester flow: planar layers of rank M, with an exact inverse by back substitution."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jax.nn import softplus
from jaxtyping import PRNGKeyArray

from ddnf.flows.householder import reflect
from ddnf.flows.parameters import UNIT, Parameters, ParametricBijection, condition_shape
from ddnf.flows.root import increasing_root


class Sylvester(ParametricBijection):
    """A Sylvester layer: f(z) = z + Q R tanh(S Q^T z + b), Q with orthonormal columns, R and S upper triangular.

    Invertible where r_ii s_ii > -1 (van den Berg, Hasenclever, Tomczak and Welling, "Sylvester normalizing flows for
    variational inference", 2018): here s_ii > 0, which loses nothing as tanh is odd, and r_ii s_ii =
    -1 + softplus(.), where the authors keep both within (-1, 1). Q is the first M columns of a product of M Householder
    reflections: any such Q, up to signs, and orthogonal to rounding. With s = Q^T z the inverse solves
    s + R tanh(S s + b) = Q^T y from the last coordinate to the first, each the root of one increasing function.

    Args:
        key: random key of the initial parameters: R has a small diagonal and zeros elsewhere.
        dim: dimension.
        rank: M, the number of columns of Q.
        condition_dim: dimension of the condition, which predicts Q, R, S and b; None for none.
        size: hidden units of the network that does so.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> layer = Sylvester(jr.key(0), 3, rank=2)
        >>> y, log_det = layer.transform_and_log_det(jnp.array([1.0, -2.0, 0.5]))
        >>> bool(jnp.allclose(layer.inverse(y), jnp.array([1.0, -2.0, 0.5]), atol=1e-5))
        True
    """

    rank: int = eqx.field(static=True)

    def __init__(self, key: PRNGKeyArray, dim: int, *, rank: int, condition_dim: int | None = None, size: int = 32):
        if not 1 <= rank <= dim:
            raise ValueError(f"Expected rank between 1 and dim, {dim}; got {rank}.")
        vectors_key, slopes_key, b_key, network_key = jr.split(key, 4)
        slopes = UNIT + 0.1 * jr.normal(slopes_key, (rank,))
        matrices = jnp.stack([jnp.diag(slopes), UNIT * jnp.eye(rank)])
        vectors, b = jr.normal(vectors_key, (rank * dim,)), jr.normal(b_key, (rank,))
        initial = jnp.concatenate([vectors, matrices.ravel(), b])
        self.parameters = Parameters(network_key, initial, condition_dim=condition_dim, size=size)
        self.shape, self.cond_shape, self.rank = (dim,), condition_shape(condition_dim), rank

    def transform_and_log_det(self, x: Any, condition: Any = None):
        Q, R, S, b, slopes = self._at(condition)
        h = jnp.tanh(S @ (x @ Q) + b)
        return x + Q @ (R @ h), _log_det(h, slopes)

    def inverse_and_log_det(self, y: Any, condition: Any = None):
        Q, R, S, b, slopes = self._at(condition)
        target = y @ Q

        def coordinate(carry, i):
            # Coordinates after i are known, those before it are still zero.
            s, h = carry
            aim, shift, r = target[i] - R[i] @ h, b[i] + S[i] @ s, R[i, i]
            reach = jnp.abs(r)
            root = increasing_root(lambda s: s + r * jnp.tanh(S[i, i] * s + shift) - aim, aim - reach, aim + reach)
            return (s.at[i].set(root), h.at[i].set(jnp.tanh(S[i, i] * root + shift))), None

        zeros = jnp.zeros_like(target)
        (s, h), _ = lax.scan(coordinate, (zeros, zeros), jnp.arange(self.rank), reverse=True)
        return y - Q @ (target - s), -_log_det(h, slopes)

    def _at(self, condition):
        """Q, R, S, b, and 1 + r_ii s_ii."""
        dim, rank = self.shape[0], self.rank
        vectors, matrices, b = jnp.split(self.parameters(condition), [rank * dim, rank * dim + 2 * rank**2])
        R, S = matrices.reshape(2, rank, rank)
        slopes, diagonal = softplus(jnp.diag(R)), softplus(jnp.diag(S))
        R = jnp.triu(R, 1) + jnp.diag((slopes - 1) / diagonal)
        S = jnp.triu(S, 1) + jnp.diag(diagonal)
        return _orthonormal(vectors.reshape(rank, dim)), R, S, b, slopes


def _orthonormal(vectors):
    rank, dim = vectors.shape
    return lax.scan(lambda Q, v: (reflect(Q, v), None), jnp.eye(dim, rank, dtype=vectors.dtype), vectors)[0]


def _log_det(h, slopes):
    # The Jacobian's factor tanh' S R is triangular; 1 + (slope - 1) tanh' without cancellation.
    return jnp.sum(jnp.log(h**2 + slopes * (1 - h**2)))
