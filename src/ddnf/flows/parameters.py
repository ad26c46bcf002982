"""Parameters that may depend on a condition, bijections made of them, and layers stacked for a scan."""

import math
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from flowjax.bijections import AbstractBijection, Scan
from jaxtyping import Array, Float, PRNGKeyArray

# softplus(UNIT) = 1
UNIT = math.log(math.e - 1)


class Parameters(eqx.Module):
    """The parameters of one layer as a vector: free, or predicted from the condition (amortised).

    With a condition c they are start + W tanh(V c + a), where W is initially small.

    Args:
        key: random key of the network.
        start: initial parameters.
        condition_dim: dimension of the condition; None for none.
        size: hidden units of the network.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> Parameters(jr.key(0), jnp.ones(3), condition_dim=2, size=4)(jnp.zeros(2)).shape
        (3,)
    """

    start: Float[Array, " n"]
    network: eqx.nn.MLP | None

    def __init__(self, key: PRNGKeyArray, start: Float[Array, " n"], *, condition_dim: int | None, size: int):
        self.start, self.network = start, None
        if condition_dim is not None:
            network = eqx.nn.MLP(condition_dim, len(start), size, 1, jnp.tanh, use_final_bias=False, key=key)
            self.network = eqx.tree_at(lambda net: net.layers[-1].weight, network, replace_fn=lambda w: 0.1 * w)

    def __call__(self, condition: Array | None) -> Float[Array, " n"]:
        if self.network is None:
            return self.start
        assert condition is not None  # FlowJAX has checked it
        return self.start + self.network(condition)


class ParametricBijection(AbstractBijection):
    """A bijection of vectors with one vector of parameters, which a condition may predict."""

    parameters: Parameters
    shape: tuple[int, ...] = eqx.field(static=True)
    cond_shape: tuple[int, ...] | None = eqx.field(static=True)


def stack(key: PRNGKeyArray, layers: int, make: Callable[[PRNGKeyArray], AbstractBijection]) -> Scan:
    """Composes layers of the same kind as one scan, which compiles as fast as one layer.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> from flowjax.bijections import Loc
        >>> stack(jr.key(0), 3, lambda key: Loc(jnp.ones(2))).transform(jnp.zeros(2)).tolist()
        [3.0, 3.0]
    """
    # Not compiled: FlowJAX's bijections close over arrays, which must not be tracers.
    return Scan(eqx.filter_vmap(make)(jr.split(key, layers)))


def condition_shape(condition_dim: int | None) -> tuple[int, ...] | None:
    """FlowJAX's `cond_shape` for a condition of this dimension.

    Example:
        >>> condition_shape(3), condition_shape(None)
        ((3,), None)
    """
    return None if condition_dim is None else (condition_dim,)
