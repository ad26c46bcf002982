"""The deep sigmoidal transformer of neural autoregressive flows."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from flowjax.bijections import AbstractBijection
from jax.nn import log_sigmoid, log_softmax, sigmoid, softmax, softplus
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float
from paramax import Parameterize

from ddnf.flows.parameters import UNIT
from ddnf.flows.root import increasing_root

_SHARE = 1e-3


class DeepSigmoidal(AbstractBijection):
    """A bijection of the line: y = e x + (1 - e) logit(sum_j w_j sigmoid(a_j x + b_j)), a_j > 0, w on the simplex.

    Huang, Krueger, Lacoste and Courville, "Neural autoregressive flows", 2018, who have no e. Their guard, which keeps
    the logit's argument off 0 and 1, is not needed here: it and its complement are both sums in the logarithmic
    domain, so the tails are straight lines in any precision. But between two steep sigmoids the sum may be flat to
    rounding, and then the inverse is lost and densities become infinite. A share
    e = 0.001 of the identity bounds the slope from below. In FlowJAX's `MaskedAutoregressive` the conditioner's output
    is added to the parameters before their constraints.

    Without e the inverse of y lies between the smallest and the largest of (y - b_j) / a_j, and with it near there.

    Args:
        count: number of sigmoids. Initially they are spread out with slope 1, nearly the identity.

    Example:
        >>> import jax.numpy as jnp
        >>> bijection = DeepSigmoidal(8)
        >>> bool(jnp.allclose(bijection.inverse(bijection.transform(1e4)), 1e4))
        True
    """

    slopes: Any
    shifts: Float[Array, "*batch count"]
    log_weights: Any
    shape: tuple[int, ...] = eqx.field(static=True)
    cond_shape: tuple[int, ...] | None = eqx.field(static=True)

    def __init__(self, count: int):
        if count < 1:
            raise ValueError(f"Expected count of at least 1; got {count}.")
        self.slopes = Parameterize(_positive, jnp.full(count, UNIT))
        self.shifts = jnp.linspace(-1.0, 1.0, count) if count > 1 else jnp.zeros(1)
        self.log_weights = Parameterize(log_softmax, jnp.zeros(count))
        self.shape, self.cond_shape = (), None

    def transform_and_log_det(self, x: Any, condition: Any = None):
        inner = self.slopes * x + self.shifts
        below, above = self.log_weights + log_sigmoid(inner), self.log_weights + log_sigmoid(-inner)
        # d logsumexp(below) - d logsumexp(above): positive terms only, none of them large.
        slope = jnp.sum(self.slopes * (softmax(below) * sigmoid(-inner) + softmax(above) * sigmoid(inner)))
        y = _SHARE * x + (1 - _SHARE) * (logsumexp(below) - logsumexp(above))
        return y, jnp.log(_SHARE + (1 - _SHARE) * slope)

    def inverse_and_log_det(self, y: Any, condition: Any = None):
        ends = (y - self.shifts) / self.slopes
        x = increasing_root(lambda x: self.transform(x) - y, jnp.min(ends), jnp.max(ends))
        return x, -self.transform_and_log_det(x)[1]


def _positive(raw):
    # With an a of nearly 0 the bracket of the root would be unbounded.
    return softplus(raw) + 1e-3
