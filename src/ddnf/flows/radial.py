"""The radial flow, with its inverse in closed form."""

from typing import Any

import jax.numpy as jnp
import jax.random as jr
from jax.nn import softplus
from jaxtyping import PRNGKeyArray

from ddnf.flow.layer import safe_norm
from ddnf.flows.parameters import UNIT, Parameters, ParametricBijection, condition_shape


class Radial(ParametricBijection):
    """A radial layer: f(z) = z + beta (z - c) / (alpha + r), with r = |z - c|, alpha > 0 and beta > -alpha.

    Rezende and Mohamed, "Variational inference with normalizing flows", 2015, Appendix A.2. The
    inverse takes the radius R of y back to the positive root of r^2 + (alpha + beta - R) r = R alpha. Initially
    alpha is 1, beta is small, and the centre c is a draw of the standard normal.

    Args:
        key: random key of the initial parameters.
        dim: dimension.
        condition_dim: dimension of the condition, which predicts c, alpha and beta; None for none.
        size: hidden units of the network that does so.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> layer = Radial(jr.key(0), 2)
        >>> y, log_det = layer.transform_and_log_det(jnp.array([1.0, -2.0]))
        >>> bool(jnp.allclose(layer.inverse(y), jnp.array([1.0, -2.0]), atol=1e-5))
        True
    """

    def __init__(self, key: PRNGKeyArray, dim: int, *, condition_dim: int | None = None, size: int = 32):
        centre_key, beta_key, network_key = jr.split(key, 3)
        raw = UNIT + jnp.concatenate([jnp.zeros(1), 0.1 * jr.normal(beta_key, (1,))])
        initial = jnp.concatenate([jr.normal(centre_key, (dim,)), raw])
        self.parameters = Parameters(network_key, initial, condition_dim=condition_dim, size=size)
        self.shape, self.cond_shape = (dim,), condition_shape(condition_dim)

    def transform_and_log_det(self, x: Any, condition: Any = None):
        centre, alpha, total = self._at(condition)
        r = safe_norm(x - centre)
        return centre + (x - centre) * (r + total) / (r + alpha), self._log_det(r, alpha, total)

    def inverse_and_log_det(self, y: Any, condition: Any = None):
        centre, alpha, total = self._at(condition)
        radius = safe_norm(y - centre)
        p = total - radius
        root = jnp.sqrt(p**2 + 4 * radius * alpha)
        # Two forms of the same root, each used where it has no cancellation.
        r = jnp.where(p > 0, 2 * radius * alpha / (jnp.abs(p) + root), (jnp.abs(p) + root) / 2)
        return centre + (y - centre) * (r + alpha) / (r + total), -self._log_det(r, alpha, total)

    def _at(self, condition):
        """The centre, alpha, and alpha + beta."""
        raw = self.parameters(condition)
        alpha, total = softplus(raw[-2:])
        return raw[:-2], alpha, total

    def _log_det(self, r, alpha, total):
        across = jnp.log(r + total) - jnp.log(r + alpha)
        along = jnp.log(r**2 + 2 * alpha * r + alpha * total) - 2 * jnp.log(r + alpha)
        return (self.shape[0] - 1) * across + along
