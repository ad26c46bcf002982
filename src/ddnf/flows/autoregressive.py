"""Autoregressive flows built from FlowJAX: masked ones with any transformer (IAF, MAF, NAF), and block networks."""

import equinox as eqx
import jax
import jax.numpy as jnp
from flowjax.bijections import (
    AbstractBijection,
    Affine,
    BlockAutoregressiveNetwork,
    Chain,
    Flip,
    MaskedAutoregressive,
    NumericalInverse,
    Scan,
)
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray
from paramax import Parameterize
from paramax.utils import inv_softplus

from ddnf.flows.parameters import stack
from ddnf.flows.root import increasing_root

_MIN_SCALE = 1e-2


def masked(
    key: PRNGKeyArray,
    dim: int,
    *,
    transformer: AbstractBijection,
    layers: int = 1,
    condition_dim: int | None = None,
    size: int = 32,
) -> Scan:
    """Layers of `MaskedAutoregressive`, each followed by a reversal of the coordinates; forward is the fast direction.

    Kingma et al., "Improved variational inference with inverse autoregressive flow", 2016.

    Args:
        key: random key of the weights.
        dim: dimension, at least 2 without a condition.
        transformer: bijection of the line, to whose parameters the conditioner adds its output.
        layers: number of layers.
        condition_dim: dimension of the condition; None for none.
        size: hidden units in each of the conditioner's two layers.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> masked(jr.key(0), 3, transformer=Affine(), layers=2).transform(jnp.ones(3)).shape
        (3,)
    """

    def layer(key):
        bijection = MaskedAutoregressive(
            key,
            transformer=transformer,
            dim=dim,
            cond_dim=condition_dim,
            nn_width=size,
            nn_depth=2,
            nn_activation=jax.nn.gelu,
        )
        return Chain([bijection, Flip((dim,))])

    return stack(key, layers, layer)


def block(key: PRNGKeyArray, dim: int, *, layers: int = 1, condition_dim: int | None = None, size: int = 8) -> Scan:
    """Layers of `BlockAutoregressiveNetwork`, each followed by a reversal of the coordinates.

    De Cao, Titov and Aziz, "Block neural autoregressive flow", 2019. The inverse is a root for each coordinate in turn.
    FlowJAX's layers have no gates and start far from the identity, so a few wide layers train better than many layers.

    Args:
        key: random key of the weights.
        dim: dimension.
        layers: number of layers.
        condition_dim: dimension of the condition; None for none.
        size: hidden units per dimension, in each of two layers.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> flow = block(jr.key(0), 2, layers=2)
        >>> bool(jnp.allclose(flow.inverse(flow.transform(jnp.ones(2))), 1.0, atol=1e-4))
        True
    """

    def layer(key):
        network = BlockAutoregressiveNetwork(key, dim=dim, cond_dim=condition_dim, depth=2, block_dim=size)
        # Our root finder has implicit gradients; FlowJAX's root finder omits the gradient of the condition.
        bijection = NumericalInverse(network, invert_autoregressive, use_implicit_differentation=False)
        return Chain([bijection, Flip((dim,))])

    return stack(key, layers, layer)


def invert_autoregressive(
    bijection: AbstractBijection, y: Float[Array, " dim"], condition: Array | None = None
) -> Float[Array, " dim"]:
    """Inverts an increasing autoregressive map to rounding, one coordinate after another.

    Example:
        >>> import jax.numpy as jnp
        >>> invert_autoregressive(Affine(jnp.ones(2), 2 * jnp.ones(2)), jnp.array([3.0, 5.0])).round(4).tolist()
        [1.0, 2.0]
    """

    def coordinate(x, i):
        root = increasing_root(
            lambda value: bijection.transform(x.at[i].set(value), condition)[i] - y[i], y[i] - 1, y[i] + 1
        )
        return x.at[i].set(root), None

    return lax.scan(coordinate, jnp.zeros_like(y), jnp.arange(len(y)))[0]


def floored_affine() -> Affine:
    """An affine bijection of the line whose scale stays above 0.01, which bounds its inverse.

    Example:
        >>> round(float(floored_affine().transform(2.0)), 5)
        2.0
    """
    scale = Parameterize(_floored, inv_softplus(jnp.array(1 - _MIN_SCALE)))
    return eqx.tree_at(lambda affine: affine.scale, Affine(), scale)


def _floored(raw):
    return jax.nn.softplus(raw) + _MIN_SCALE
