"""The planar flow as its authors wrote it, with an exact inverse."""

from typing import Any

import jax.numpy as jnp
import jax.random as jr
from jax.nn import softplus
from jaxtyping import PRNGKeyArray

from ddnf.flows.parameters import UNIT, Parameters, ParametricBijection, condition_shape
from ddnf.flows.root import increasing_root


class Planar(ParametricBijection):
    """A planar layer: f(z) = z + u' tanh(w.z + b), with u' = u + (m(w.u) - w.u) w / |w|^2.

    m(x) = -1 + softplus(x) keeps w.u' above -1, so that the map is invertible (Rezende and Mohamed, "Variational
    inference with normalizing flows", 2015, Appendix A.1). FlowJAX's `Planar` constrains w.u' differently.
    The inverse is exact: a = w.z is the root of a + (w.u') tanh(a + b) = w.y. Initially w is a random unit vector
    and u' is small.

    Args:
        key: random key of the initial parameters.
        dim: dimension.
        condition_dim: dimension of the condition, which predicts u, w and b; None for none.
        size: hidden units of the network from the condition to these.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> layer = Planar(jr.key(0), 2)
        >>> y, log_det = layer.transform_and_log_det(jnp.array([1.0, -2.0]))
        >>> bool(jnp.allclose(layer.inverse(y), jnp.array([1.0, -2.0]), atol=1e-5))
        True
    """

    def __init__(self, key: PRNGKeyArray, dim: int, *, condition_dim: int | None = None, size: int = 32):
        w_key, u_key, b_key, network_key = jr.split(key, 4)
        w = jr.normal(w_key, (dim,))
        w = w / jnp.linalg.norm(w)
        u = UNIT * w + 0.1 * jr.normal(u_key, (dim,))
        initial = jnp.concatenate([u, w, jr.normal(b_key, (1,))])
        self.parameters = Parameters(network_key, initial, condition_dim=condition_dim, size=size)
        self.shape, self.cond_shape = (dim,), condition_shape(condition_dim)

    def transform_and_log_det(self, x: Any, condition: Any = None):
        u, w, b, slope = self._at(condition)
        h = jnp.tanh(w @ x + b)
        return x + u * h, _log_det(h, slope)

    def inverse_and_log_det(self, y: Any, condition: Any = None):
        u, w, b, slope = self._at(condition)
        target, push = w @ y, slope - 1
        reach = jnp.abs(push)
        a = increasing_root(lambda a: a + push * jnp.tanh(a + b) - target, target - reach, target + reach)
        h = jnp.tanh(a + b)
        return y - u * h, -_log_det(h, slope)

    def _at(self, condition):
        dim = self.shape[0]
        u, w, b = jnp.split(self.parameters(condition), [dim, 2 * dim])
        slope = softplus(w @ u)
        return u + (slope - 1 - w @ u) * w / (w @ w), w, b[0], slope


def _log_det(h, slope):
    # log(1 + (slope - 1) tanh'), without cancellation.
    return jnp.log(h**2 + slope * (1 - h**2))
