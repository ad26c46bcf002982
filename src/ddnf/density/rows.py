"""Converts users' tables to rows of numbers, or raises a clear one-line error."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import Tracer
from jaxtyping import Float

from ddnf.density.columns import Column, label, outside

FEWEST_ROWS = 10
_WIDEST, _FARTHEST = 1e100, 1e35


def table(x: Any, dim: int, name: str) -> Any:
    """Rows (..., dim) as double-precision NumPy; tracers stay as they are."""
    found = x if isinstance(x, Tracer) else numbers(x, name)
    if found.shape[-1:] != (dim,):
        raise ValueError(f"Expected {name} of shape (..., {dim}); got {found.shape}.")
    return found


def finite_rows(x: Any, name: str) -> Float[np.ndarray, "n dim"]:
    """A table (rows, columns) of finite numbers; raises if it is not one."""
    rows = numbers(x, name)
    if rows.ndim != 2 or 0 in rows.shape:
        one = ".to_frame()" if hasattr(x, "to_frame") else "[:, None]"
        hint = f": for one column write {name}{one}" if rows.ndim == 1 else ""
        raise ValueError(
            f"Expected {name} of shape (rows, columns), with at least one of each; got {rows.shape}{hint}."
        )
    bad = ~np.isfinite(rows).all(axis=1)
    if bad.any():
        first = int(np.argmax(bad))
        place = f"row {first}, column {int(np.argmax(~np.isfinite(rows[first])))}"
        raise ValueError(
            f"Expected finite {name}; got NaN or infinity in {bad.sum()} rows, the first is {place}."
            " missing='drop' leaves rows with NaN out."
        )
    return rows


def conditions(condition: Any, count: int) -> Float[np.ndarray, "n condition"]:
    """A condition for each of `count` rows."""
    given = finite_rows(condition, "condition")
    if len(given) != count:
        raise ValueError(f"Expected a condition for each of {count} rows; got {len(given)}.")
    constant = np.flatnonzero(np.ptp(given, axis=0) == 0)
    if len(constant):
        raise ValueError(f"Expected conditions that vary; number {constant[0]} has one value only: leave it out.")
    _check_scale(given, "condition ")
    return given


def check_rows(rows: Float[np.ndarray, "n dim"], columns: Sequence[Column], names: Sequence[str] | None = None) -> None:
    """Raises unless there are enough rows, inside their support, and no column is constant."""
    if len(rows) < FEWEST_ROWS:
        raise ValueError(f"Expected at least {FEWEST_ROWS} rows; got {len(rows)}.")
    if (fault := outside(columns, rows, names)) is not None:
        raise ValueError(f"Expected x in its support; {fault}.")
    constant = np.flatnonzero(np.ptp(rows, axis=0) == 0)
    if len(constant):
        raise ValueError(
            f"Expected columns that vary; {label(int(constant[0]), names)} has one value only: leave it out."
        )
    _check_scale(rows, "column ", names)


def check_far(
    standard: Float[np.ndarray, "n dim"], rows: Float[np.ndarray, "n dim"], names: Sequence[str] | None
) -> None:
    """Raises if a standardized value would overflow in single precision."""
    row, column = np.unravel_index(np.argmax(np.abs(standard)), standard.shape)
    if np.abs(standard[row, column]) > _FARTHEST:
        raise ValueError(
            f"Expected values within {_FARTHEST:g} standard deviations; {label(int(column), names)} has "
            f"{rows[row, column]:.3g}: drop it, or model logarithms."
        )


def _check_scale(rows, what, names: Sequence[str] | None = None) -> None:
    """Raises if squares of differences would overflow, or vanish."""
    with np.errstate(over="ignore"):
        width = np.ptp(rows, axis=0)
    bad = np.flatnonzero((width < 1 / _WIDEST) | (width > _WIDEST))
    if len(bad):
        name = f"{what}{bad[0]}" if names is None else f"{what}{names[bad[0]]!r}"
        raise ValueError(
            f"Expected values that differ by {1 / _WIDEST:g} to {_WIDEST:g}; those of {name} differ by "
            f"{width[bad[0]]:.3g}: use another unit."
        )


def check_names(names: Sequence[str] | None, count: int) -> tuple[str, ...] | None:
    """Names as a tuple, one for each column and condition."""
    if names is None:
        return None
    if isinstance(names, str) or len(names) != count:
        raise ValueError(f"Expected {count} names; got {names!r}.")
    return tuple(map(str, names))


def check_rate(learning_rate: float) -> None:
    """Raises unless the learning rate is positive and finite."""
    if not 0 < learning_rate < np.inf:
        raise ValueError(f"Expected a positive learning_rate; got {learning_rate}.")


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy, and not a boolean."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def numbers(x: Any, name: str) -> np.ndarray:
    """Any table as double-precision NumPy."""
    try:
        found = np.ma.filled(x.astype(float), np.nan) if isinstance(x, np.ma.MaskedArray) else np.asarray(x)
        if np.iscomplexobj(found):
            raise TypeError("complex numbers")
        if found.dtype.kind in "mM":
            raise TypeError("dates and times are understood in the columns of a frame or dict")
        return found.astype(float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Expected {name} to be a table of numbers; got {type(x).__name__} ({error}).") from error
