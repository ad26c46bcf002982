"""What `fit_posterior` takes where nothing is given: flows, learning rate, affine end."""

from functools import lru_cache, partial

from jaxtyping import PRNGKeyArray

from ddnf.flow.bijection import DDNF
from ddnf.flow.scaling import ScalingField
from ddnf.posterior.modes import LARGEST_FULL
from ddnf.posterior.objective import End


def default_flow(key: PRNGKeyArray, dim: int) -> DDNF:
    """The flow that `fit_posterior` takes where none is given.

    Example:
        >>> import jax.random as jr
        >>> default_flow(jr.key(0), 3).shape
        (3,)
    """
    if dim <= 2:
        return DDNF(key, dim, blocks=4, steps=4, hidden=(16, 16), activation="softplus")
    return _scaling_flow(key, dim, 8, 3)


def larger_flow(key: PRNGKeyArray, dim: int) -> DDNF:
    """The flow that takes the place of the default one where that is not good enough."""
    if dim <= 2:
        return DDNF(key, dim, blocks=8, steps=8, hidden=(16, 16), activation="softplus")
    return _scaling_flow(key, dim, 16, 6)


def _scaling_flow(key, dim, blocks, units):
    return DDNF(key, dim, blocks=blocks, steps=2, field=_scaling_field(dim, units))


@lru_cache
def _scaling_field(dim, units):
    # The same object each time: a new one would be compiled again.
    return partial(ScalingField, dim=dim, units=units)


def default_learning_rate(dim: int) -> float:
    """Peak learning rate of Adam; smaller in many dimensions, where noise of many parameters adds up."""
    return 2e-2 * min(1.0, (20 / dim) ** 0.5)


def resolve_end(end, dim: int) -> End | None:
    """The kind of affine end, with "auto" resolved."""
    return ("full" if dim <= LARGEST_FULL else "diagonal") if end == "auto" else end
