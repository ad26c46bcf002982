"""Tables as users bring them: made into rows of numbers, or refused in one clear line."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import Tracer
from jaxtyping import Float

from ddnf.density.columns import Column, outside

FEWEST_ROWS = 10


def table(x: Any, dim: int, name: str) -> Any:
    """Rows (..., dim) as they come in, as double-precision NumPy; what is being traced stays as it is."""
    found = x if isinstance(x, Tracer) else _numbers(x, name)
    if found.shape[-1:] != (dim,):
        raise ValueError(f"Expected {name} of shape (..., {dim}); got {found.shape}.")
    return found


def finite_rows(x: Any, name: str) -> Float[np.ndarray, "n dim"]:
    """A table (rows, columns) of finite numbers, or an error that says what it is instead."""
    rows = _numbers(x, name)
    if rows.ndim != 2 or 0 in rows.shape:
        hint = ": for one column write x[:, None]" if rows.ndim == 1 else ""
        raise ValueError(
            f"Expected {name} of shape (rows, columns), with at least one of each; got {rows.shape}{hint}."
        )
    bad = ~np.isfinite(rows).all(axis=1)
    if bad.any():
        first = int(np.argmax(bad))
        raise ValueError(f"Expected finite {name}; got NaN or infinity in {bad.sum()} rows, the first is row {first}.")
    return rows


def conditions(condition: Any, count: int) -> Float[np.ndarray, "n condition"]:
    """A condition for each of `count` rows."""
    given = finite_rows(condition, "condition")
    if len(given) != count:
        raise ValueError(f"Expected a condition for each of {count} rows; got {len(given)}.")
    constant = np.flatnonzero(np.ptp(given, axis=0) == 0)
    if len(constant):
        raise ValueError(f"Expected conditions that vary; number {constant[0]} has one value only: leave it out.")
    return given


def check_rows(rows: Float[np.ndarray, "n dim"], columns: Sequence[Column]) -> None:
    """Whether there are enough rows, in their support, and none of the columns is constant; warns of repeated rows."""
    if len(rows) < FEWEST_ROWS:
        raise ValueError(f"Expected at least {FEWEST_ROWS} rows; got {len(rows)}.")
    if (complaint := outside(columns, rows)) is not None:
        raise ValueError(f"Expected x in its support; {complaint}.")
    constant = np.flatnonzero(np.ptp(rows, axis=0) == 0)
    if len(constant):
        raise ValueError(f"Expected columns that vary; column {constant[0]} has one value only: leave it out.")
    repeated = 1 - len(np.unique(rows, axis=0)) / len(rows)
    if repeated > 0.01 and not all(column.integer for column in columns):
        warnings.warn(
            f"{repeated:.0%} of the rows repeat others: the likelihood of a density has no bound there. Drop "
            "duplicates, add noise of the size of the rounding, or tell of integers by support=.",
            RuntimeWarning,
            stacklevel=4,
        )


def held_out(validation: Any, count: int) -> int:
    """How many rows to hold out, from a share or a number."""
    is_share = isinstance(validation, float | np.floating) and 0 < validation < 1
    if not is_share and not (is_integer(validation) and validation > 0):
        raise ValueError(f"Expected validation to be a share between 0 and 1 or a number of rows; got {validation!r}.")
    held = int(np.ceil(validation * count)) if is_share else int(validation)
    if not 1 <= held <= count - 5:
        raise ValueError(f"Expected at least 5 rows to train on; got {count} rows, {held} of them held out.")
    return held


def check_numbers(numbers: dict[str, Any], learning_rate: float) -> None:
    """Whether counts are whole and positive, and the learning rate is positive."""
    for name, value in numbers.items():
        if not is_integer(value) or value < 1:
            raise ValueError(f"Expected {name} of at least 1; got {value!r}.")
    if not 0 < learning_rate < np.inf:
        raise ValueError(f"Expected a positive learning_rate; got {learning_rate}.")


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _numbers(x, name):
    try:
        found = np.asarray(x)
        if np.iscomplexobj(found):
            raise TypeError("complex numbers")
        return found.astype(float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Expected {name} to be a table of numbers; got {type(x).__name__} ({error}).") from error
