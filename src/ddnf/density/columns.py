"""Columns of a table: their supports, and the maps to unbounded space and back."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

Spec = str | tuple[float | int | None, float | int | None]


class Column(NamedTuple):
    """The support of one column: an interval (None for no end), of integers if `integer`."""

    low: float | None = None
    high: float | None = None
    integer: bool = False

    def __str__(self):
        low, high = ("-inf" if self.low is None else self.low), ("inf" if self.high is None else self.high)
        return f"{'integers of ' if self.integer else ''}({low}, {high})"


NAMED = {
    "real": Column(),
    "positive": Column(0.0),
    "unit": Column(0.0, 1.0),
    "integer": Column(integer=True),
    "count": Column(0.0, integer=True),
}


Support = Spec | Sequence[Spec] | Mapping[int, Spec] | Mapping[str, Spec] | None


def columns_from(support: Support, dim: int, names: Sequence[str] | None = None) -> tuple[Column, ...]:
    """One `Column` for each of `dim` columns.

    Args:
        support: None (all real); one of "real", "positive", "unit", "integer", "count" or an interval (low, high), with
            None for no end, for all columns; a list of them, one for each column; or a dict from column
            numbers or names.
        names: of the columns.

    Example:
        >>> columns_from({1: "positive"}, 2)[1]
        Column(low=0.0, high=None, integer=False)
        >>> columns_from([(0, 10), "count"], 2)[0].high
        10.0
    """
    if support is None or isinstance(support, str) or _is_interval(support):
        return (_column("real" if support is None else support),) * dim
    if isinstance(support, Mapping):
        known = {_number(key, dim, names): spec for key, spec in support.items()}
        return tuple(_column(known.get(number, "real")) for number in range(dim))
    if not isinstance(support, Sequence) or len(support) != dim:
        raise ValueError(f"Expected a support for each of {dim} columns; got {support!r}.")
    return tuple(_column(spec) for spec in support)


def _number(key, dim: int, names: Sequence[str] | None) -> int:
    if isinstance(key, str) and names is not None and key in names[:dim]:
        return list(names).index(key)
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < dim:
        known = "" if names is None else f" or names of {', '.join(names[:dim])}"
        raise ValueError(f"Expected column numbers from 0 to {dim - 1}{known} in support; got {key!r}.")
    return key


def label(number: int, names: Sequence[str] | None = None) -> str:
    """The name of a column in messages.

    Example:
        >>> label(1), label(1, ["a", "b"])
        ('column 1', "column 'b'")
    """
    return f"column {number}" if names is None else f"column {names[number]!r}"


def outside(columns: Sequence[Column], x: Float[np.ndarray, "n dim"], names: Sequence[str] | None = None) -> str | None:
    """Describes the first column with values outside its support; None if there is none."""
    # An integer n stands for the interval [n, n + 1), so it may lie on the lower end.
    integer = np.array([column.integer for column in columns])
    fine = inside(columns, x + 0.5 * integer).all(axis=0)
    for number, column in enumerate(columns):
        if not fine[number]:
            return f"{label(number, names)} has values outside of {column}"
        if column.integer and (x[:, number] != np.floor(x[:, number])).any():
            return f"{label(number, names)} has values that are not integers"
    return None


def inside(columns: Sequence[Column], x: Any) -> Any:
    """Which values lie in the interval of their column. NumPy in, NumPy out; otherwise JAX."""
    filled = [_filled(column) for column in columns]
    low = np.array([-np.inf if column.low is None else column.low for column in filled])
    high = np.array([np.inf if column.high is None else column.high for column in filled])
    return (x > low) & (x < high)


def to_real(columns: Sequence[Column], x: Any) -> tuple[Any, Any]:
    """Rows in unbounded space, and the log-determinant of that map. NumPy in, NumPy out; otherwise JAX."""
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    parts, log_det = [], xp.zeros(x.shape[:-1], x.dtype)
    for number, column in enumerate(columns):
        value, change = _to_real(xp, _filled(column), x[..., number])
        parts.append(value)
        log_det = log_det + change
    return xp.stack(parts, axis=-1), log_det


def from_real(columns: Sequence[Column], u: Any) -> Any:
    """Rows in their support, from unbounded space; integers are rounded down. NumPy in, NumPy out; otherwise JAX."""
    xp: Any = np if isinstance(u, np.ndarray) else jnp
    parts = []
    for number, column in enumerate(columns):
        value = _clip_inside(xp, _filled(column), _from_real(xp, _filled(column), u[..., number]))
        parts.append(xp.floor(value) if column.integer else value)
    return xp.stack(parts, axis=-1)


def _clip_inside(xp, column, x):
    """Moves values that rounding put on an end of the interval or at infinity to the nearest number inside."""
    tiny, kind = np.finfo(x.dtype).tiny, x.dtype.type  # below `tiny`, XLA rounds to zero
    x = xp.clip(x, np.finfo(x.dtype).min, np.finfo(x.dtype).max)  # NaN stays
    if column.low is not None:
        x = xp.maximum(x, max(np.nextafter(kind(column.low), kind(np.inf)), kind(column.low) + tiny))
    if column.high is not None:
        x = xp.minimum(x, min(np.nextafter(kind(column.high), kind(-np.inf)), kind(column.high) - tiny))
    return x


def _filled(column: Column) -> Column:
    """The interval that is the union of [n, n + 1) over the integers n of the support."""
    return column._replace(high=column.high + 1) if column.integer and column.high is not None else column


def _to_real(xp, column, x):
    low, high = column.low, column.high
    if low is not None and high is not None:
        share = (x - low) / (high - low)
        return xp.log(share) - xp.log1p(-share), -xp.log(share) - xp.log1p(-share) - np.log(high - low)
    if low is not None:
        return xp.log(x - low), -xp.log(x - low)
    if high is not None:
        return -xp.log(high - x), -xp.log(high - x)
    return x, 0.0


def _from_real(xp, column, u):
    low, high = column.low, column.high
    if low is not None and high is not None:
        return low + (high - low) * (0.5 + 0.5 * xp.tanh(0.5 * u))
    if low is not None:
        return low + xp.exp(u)
    if high is not None:
        return high - xp.exp(-u)
    return u


def _is_interval(spec) -> TypeGuard[tuple[float | None, float | None]]:
    return isinstance(spec, tuple) and len(spec) == 2 and all(e is None or isinstance(e, int | float) for e in spec)


def _column(spec: Any) -> Column:
    if isinstance(spec, str) and spec in NAMED:
        return NAMED[spec]
    if not _is_interval(spec):
        known = ", ".join(NAMED)
        raise ValueError(f"Expected a support of {known} or an interval (low, high); got {spec!r}.")
    low, high = (-np.inf if spec[0] is None else spec[0]), (np.inf if spec[1] is None else spec[1])
    if not low < high:
        raise ValueError(f"Expected an interval with low < high; got {spec!r}.")
    return Column(_end(low), _end(high))


def _end(value) -> float | None:
    return None if np.isinf(value) else float(value)
