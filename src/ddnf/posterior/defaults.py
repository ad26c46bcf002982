"""Defaults of `fit_posterior`: flows, learning rate and the final affine map."""

from functools import lru_cache, partial

import equinox as eqx
from jaxtyping import PRNGKeyArray

from ddnf.flow.bijection import DDNF
from ddnf.flow.scaling import ScalingField, stacked_fields
from ddnf.posterior.modes import LARGEST_FULL
from ddnf.posterior.objective import End

# Blocks and units above two dimensions.
_SIZE, _LARGER_SIZE = (8, 3), (16, 6)


def default_flow(key: PRNGKeyArray, dim: int) -> DDNF:
    """The default flow of `fit_posterior`.

    Example:
        >>> import jax.random as jr
        >>> default_flow(jr.key(0), 3).shape
        (3,)
    """
    if dim <= 2:
        return untrained_flow(key, dim)
    blocks, units = _SIZE
    return DDNF(key, dim, blocks=blocks, steps=2, field=_scaling_field(dim, units))


def untrained_flow(key: PRNGKeyArray, dim: int, *, is_larger: bool = False) -> DDNF:
    """The default flow of a fit, or the larger flow that replaces it if it is not good enough.

    Above two dimensions its initial weights are drawn by NumPy: nothing is compiled.

    Example:
        >>> import jax.random as jr
        >>> untrained_flow(jr.key(0), 3, is_larger=True).blocks
        16
    """
    if dim <= 2:
        count = 8 if is_larger else 4
        return DDNF(key, dim, blocks=count, steps=count, hidden=(16, 16), activation="softplus")
    blocks, units = _LARGER_SIZE if is_larger else _SIZE
    blank = eqx.filter_eval_shape(DDNF, key, dim, blocks=blocks, steps=2, field=_scaling_field(dim, units))
    return eqx.tree_at(lambda flow: flow.fields, blank, stacked_fields(key, blocks, dim, units))


@lru_cache
def _scaling_field(dim, units):
    # The same object each time: a new one would be compiled again.
    return partial(ScalingField, dim=dim, units=units)


def default_learning_rate(dim: int) -> float:
    """Peak learning rate of Adam; smaller in many dimensions, where the noise of many parameters adds up."""
    return 2e-2 * min(1.0, (20 / dim) ** 0.5)


def default_spread(dim: int) -> float:
    """The factor by which a quarter of the draws is spread out to improve the tails.

    It is smaller in many dimensions, where such draws would be far from all others.
    """
    return 1 + 0.25 * min(1.0, (20 / dim) ** 0.5)


def resolve_end(end, dim: int) -> End | None:
    """The kind of affine end, with "auto" resolved."""
    return ("full" if dim <= LARGEST_FULL else "diagonal") if end == "auto" else end
