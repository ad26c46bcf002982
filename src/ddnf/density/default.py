"""The flow of a default fit: its kind and size from the number of rows and columns."""

from collections.abc import Sequence

import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection, Identity, Invert
from jaxtyping import PRNGKeyArray

from ddnf.flow.bijection import DDNF
from ddnf.flow.random import generator
from ddnf.flows import make

MANY_COLUMNS = 16
FEW_ROWS = 5000
_MANY_ROWS = 10_000
# Minus the log density of the flow's parameters: that of normal ones with precision 100.
_PRECISION = 100.0


def default_flow(
    key: PRNGKeyArray,
    dim: int,
    condition_dim: int | None = None,
    *,
    rows: int | None = None,
    blocks: int | None = None,
    steps: int | None = None,
    hidden: Sequence[int] | None = None,
    activation: str = "softplus",
) -> AbstractBijection:
    """The flow that `fit_density` uses by default: from a mixture of Gaussians to whitened rows.

    Splines on the columns and the mixture, which are trained with it, already describe a table of few rows: for fewer
    than 5,000 rows of at most 16 columns it is the identity. Larger tables get two layers of autoregressive splines,
    wider for more rows and columns. With a condition, or if one of the settings of a `DDNF` is given, it is a `DDNF`
    with bounded weights, inverted, so that training needs no inverse. None of these can fold.

    Args:
        key: random key.
        dim: number of columns.
        condition_dim: number of conditions; None without.
        rows: number of rows; None for many.
        blocks, steps, hidden, activation: settings of a `DDNF`.

    Example:
        >>> import jax.random as jr
        >>> default_flow(jr.key(0), 3, rows=500)
        Identity(shape=(3,), cond_shape=None)
    """
    is_plain = condition_dim is None and (blocks, steps, hidden, activation) == (None, None, None, "softplus")
    if is_plain and (dim == 1 or (rows is not None and rows < FEW_ROWS and dim <= MANY_COLUMNS)):
        return Identity((dim,))
    if dim > MANY_COLUMNS and (blocks, steps, hidden, activation) == (None, None, None, "softplus"):
        return make("spline-maf", _quick_key(key), dim, layers=2, condition_dim=condition_dim, size=128)
    if is_plain:
        size = 32 if rows is not None and rows < _MANY_ROWS else 64
        return make("spline-maf", _quick_key(key), dim, layers=2, size=size)
    blocks = (4 if condition_dim is None else 8) if blocks is None else blocks
    steps = (1 if condition_dim is None else 2) if steps is None else steps
    if hidden is None:
        hidden = (64, 64) if dim <= 3 else (64, 8, 64)
    if isinstance(hidden, str) or not isinstance(hidden, Sequence):
        raise ValueError(f"Expected hidden to be a sequence of widths, such as (64, 64); got {hidden!r}.")
    return Invert(
        DDNF(
            key,
            dim,
            blocks=blocks,
            steps=steps,
            hidden=tuple(hidden),
            condition_dim=condition_dim,
            activation=activation,
            lipschitz=0.97,
        )
    )


def _quick_key(key):
    """A key of another kind: the initial weights take a second to compile, and with JAX's own kind five."""
    return jr.wrap_key_data(generator(key).integers(2**32, size=4, dtype=np.uint32), impl="rbg")


def default_rate(dim: int, *, is_default: bool) -> float:
    """The peak learning rate of Adam, with the default flow or one of the user's own."""
    return 2e-3 if is_default and dim > MANY_COLUMNS else 5e-3


def default_penalty(rows: int, *, has_condition: bool) -> float:
    """What half of the sum of squares of the default flow's parameters adds to the loss of a row."""
    return 0.0 if has_condition else _PRECISION / rows
