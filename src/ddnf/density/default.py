"""The flow of a default fit: its kind and size from the number of rows and columns."""

from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
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
# Precision of a normal prior on the flow's parameters. The flow of a single column only learns from its condition: with
# a precision of 100, one fit in three learned nothing but the regression.
_PRECISION, _PRECISION_SINGLE = 100.0, 1.0
_EPOCHS = 50


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

    For fewer than 5,000 rows of at most 16 columns it is the identity: the splines on the columns and the mixture,
    which are trained with it, suffice for small tables. Larger tables get two layers of autoregressive splines, wider
    for more rows and columns. With a condition, several columns get four layers, because the column splines and the
    mixture do not depend on the condition, and a single column gets two layers whose knots depend on it. If a setting
    of a `DDNF` is given, the flow is an inverted `DDNF` with bounded weights, so that training needs no inverse. None
    of these flows can fold.

    Args:
        key: random key.
        dim: number of columns.
        condition_dim: number of conditions; None without.
        rows: number of rows; None for many.
        blocks, steps, hidden, activation: settings of a `DDNF`.

    Example:
        >>> import jax.random as jr
        >>> type(default_flow(jr.key(0), 3, rows=500)).__name__
        'Identity'
    """
    is_ddnf = (blocks, steps, hidden, activation) != (None, None, None, "softplus")
    has_few = rows is not None and rows < FEW_ROWS
    if not is_ddnf and condition_dim is None and (dim == 1 or (has_few and dim <= MANY_COLUMNS)):
        return Identity((dim,))
    if not is_ddnf:
        layers = 2 if condition_dim is None or dim == 1 or dim > MANY_COLUMNS else 4
        size = 128 if dim > MANY_COLUMNS else 32 if rows is not None and rows < _MANY_ROWS else 64
        return _splines(key, dim, layers, condition_dim, size)
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


def _splines(key, dim, layers, condition_dim, size):
    """Autoregressive splines; all of one size share their static parts, so that a second fit does not compile.

    FlowJAX creates new functions with each layer, which the compiler treats as different although they are equivalent.
    """
    flow = make("spline-maf", _quick_key(key), dim, layers=layers, condition_dim=condition_dim, size=size)
    known, structure = jax.tree.flatten(_remembered(flow, dim, layers, condition_dim, size))
    leaves = [new if eqx.is_array(new) else old for new, old in zip(jax.tree.leaves(flow), known, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _remembered(flow, *size):
    return _FIRST.setdefault(size, flow)


_FIRST: dict[tuple, AbstractBijection] = {}  # the first flow of each size


def _quick_key(key):
    """A key of another type, with which the initial weights compile in one second instead of five."""
    return jr.wrap_key_data(jnp.asarray(generator(key).integers(2**32, size=4, dtype=np.uint32)), impl="rbg")


class Plan(NamedTuple):
    """A flow and how it is trained.

    Attributes:
        flow: the bijection.
        learning_rate: peak learning rate of Adam.
        steps: largest number of training steps.
        penalty: what half of the sum of squares of the flow's parameters adds to the loss of a row.
    """

    flow: AbstractBijection
    learning_rate: float
    steps: int
    penalty: float


def plan(
    key: PRNGKeyArray,
    rows: int,
    dim: int,
    condition_dim: int | None,
    *,
    flow: AbstractBijection | None,
    batch: int,
) -> Plan:
    """The default flow for a table, or the user's own, with the defaults of its training."""
    steps = int(np.clip(rows // 13, 2000, 5000))
    if flow is not None:
        return Plan(flow, 5e-3, steps, 0.0)
    flow = default_flow(key, dim, condition_dim, rows=rows)
    rate = 2e-3 if dim > MANY_COLUMNS else 5e-3
    if isinstance(flow, Identity):
        return Plan(flow, rate, steps, 0.0)
    # Autoregressive splines overfit a small table within some epochs, unless there is a condition to learn from.
    is_quick = condition_dim is None or dim > MANY_COLUMNS
    most = min(steps, max(100, _EPOCHS * rows // batch)) if is_quick else steps
    return Plan(flow, rate, most, (_PRECISION_SINGLE if dim == 1 else _PRECISION) / rows)
