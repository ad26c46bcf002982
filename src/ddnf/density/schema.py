"""The contents of the columns of a user's table, and their conversion to numbers.

Numbers stay as they are. Text, categories and booleans become the number of their level, dates days since 1970, times
and durations seconds.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Real

MOST_LEVELS = 200
KINDS = ("number", "category", "day", "time", "duration")
_DAY = 86_400.0
Level = str | int | float | bool


class Field(NamedTuple):
    """One column of a table.

    Attributes:
        name: its name.
        kind: "number", "category" (text and booleans too), "day", "time" or "duration".
        dtype: what the library of the table calls its type.
        levels: of a category, in order.
    """

    name: str
    kind: str = "number"
    dtype: str = "float64"
    levels: tuple[Level, ...] = ()

    @property
    def width(self) -> int:
        """How many numbers it takes in a condition."""
        return len(self.levels) if self.kind == "category" else 1


class Raw(NamedTuple):
    """A column as it came: NumPy values with None, NaN or NaT where one is missing; its type; levels, where known."""

    values: np.ndarray
    dtype: str
    levels: tuple[Level, ...] | None = None


class Schema(NamedTuple):
    """The columns of a table.

    Attributes:
        fields: columns that are modelled.
        given: columns that the density is conditioned on.
        library: what draws are returned as: "pandas", "polars", "columns" (a dict of arrays) or "array".
    """

    fields: tuple[Field, ...]
    given: tuple[Field, ...] = ()
    library: str = "array"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in (*self.fields, *self.given))

    @property
    def numbers(self) -> list[int]:
        """Places of the columns of numbers."""
        return [i for i, field in enumerate(self.fields) if field.kind != "category"]

    @property
    def categories(self) -> list[int]:
        """Places of the categories."""
        return [i for i, field in enumerate(self.fields) if field.kind == "category"]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of levels of each category that is modelled."""
        return tuple(self.fields[i].width for i in self.categories)


def field_of(name: str, raw: Raw) -> Field:
    """The kind of values in a column; raises if they cannot be modelled.

    Example:
        >>> field_of("size", Raw(np.array(["s", "l", "s"], object), "str"))
        Field(name='size', kind='category', dtype='str', levels=('l', 's'))
    """
    values, dtype, levels = raw
    if levels is None and values.dtype.kind in "iuf":
        return Field(name, "number", dtype)
    if values.dtype.kind == "M":
        known = values[~np.isnat(values)]
        is_day = len(known) > 0 and bool((known == known.astype("datetime64[D]")).all())
        return Field(name, "day" if is_day else "time", dtype)
    if values.dtype.kind == "m":
        return Field(name, "duration", dtype)
    if levels is None:
        levels = _levels(name, values)
    if not all(type(level) in (str, int, float, bool) for level in levels) or len(set(levels)) < len(levels):
        kinds = sorted({type(level).__name__ for level in levels})
        raise ValueError(f"Expected column {name!r} to hold numbers, text, booleans or dates; got {', '.join(kinds)}.")
    if len(levels) > MOST_LEVELS:
        raise ValueError(
            f"Expected categories of at most {MOST_LEVELS} levels; column {name!r} has {len(levels)}: "
            f"{_advice(levels)}."
        )
    if len(levels) > max(10, len(values) // 2):
        raise ValueError(
            f"Expected categories that occur several times; column {name!r} has {len(levels)} in {len(values)} rows: "
            "leave it out."
        )
    if len(levels) < 2:
        raise ValueError(f"Expected columns that vary; column {name!r} has one value only: leave it out.")
    return Field(name, "category", dtype, tuple(levels))


def _advice(levels: tuple[Level, ...]) -> str:
    try:
        np.array(levels).astype(float)
    except ValueError:
        return "leave it out, or group the rare ones"
    return "they are numbers as text; convert them to numbers"


def _levels(name: str, values: np.ndarray) -> tuple[Level, ...]:
    found = {value.item() if isinstance(value, np.generic) else value for value in values[~_is_missing(values)]}
    if len(found) > MOST_LEVELS:  # no sorting of a million names
        return tuple(found)
    try:
        return tuple(sorted(found))
    except TypeError:
        return tuple(sorted(found, key=lambda level: (type(level).__name__, str(level))))


def encode(field: Field, values: np.ndarray) -> Float[np.ndarray, " n"]:
    """A column as numbers: NaN where a value is missing, -1 for an unknown level.

    Example:
        >>> encode(Field("size", "category", "str", ("l", "s")), np.array(["s", "xl", None], object)).tolist()
        [1.0, -1.0, nan]
        >>> encode(Field("born", "day"), np.array(["1970-01-03"], "datetime64[D]")).tolist()
        [2.0]
    """
    if field.kind == "category":
        code = {level: float(place) for place, level in enumerate(field.levels)}
        return np.array([np.nan if m else code.get(v, -1.0) for v, m in zip(values, _is_missing(values), strict=True)])
    if field.kind == "number":
        return _as_floats(field, values)
    unit = "timedelta64[us]" if field.kind == "duration" else "datetime64[us]"
    try:
        exact = values.astype(unit)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Expected column {field.name!r} to hold dates or times; got {error}.") from error
    seconds = np.where(np.isnat(exact), np.nan, exact.astype(np.int64) / 1e6)
    return seconds / _DAY if field.kind == "day" else seconds


def _as_floats(field: Field, values: np.ndarray) -> Float[np.ndarray, " n"]:
    try:
        return np.where(_is_missing(values), np.nan, values).astype(float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Expected column {field.name!r} to hold numbers; got {error}.") from error


def decode(field: Field, numbers: Float[np.ndarray, " n"]) -> np.ndarray:
    """The inverse of `encode`.

    Example:
        >>> decode(Field("size", "category", "str", ("l", "s")), np.array([1.0, 0.0])).tolist()
        ['s', 'l']
    """
    if field.kind == "category":
        return np.array(field.levels, object)[numbers.astype(int)]
    if field.kind == "number":
        return numbers
    micro = np.rint(numbers * (_DAY if field.kind == "day" else 1.0) * 1e6)
    # Draws from far tails can leave what 64 bits hold.
    whole = np.clip(micro, -9e18, 9e18).astype(np.int64)
    return whole.astype("timedelta64[us]" if field.kind == "duration" else "datetime64[us]")


def encode_table(fields: Sequence[Field], table: Mapping[str, Raw]) -> Float[np.ndarray, "n columns"]:
    """The named columns of a table as numbers; raises if one is not there."""
    for field in fields:
        if field.name not in table:
            known = ", ".join(map(str, table))[:200]
            raise ValueError(f"Expected a column {field.name!r}; got {known}.")
    return np.stack([encode(field, table[field.name].values) for field in fields], axis=-1)


def one_hot(codes: Real[np.ndarray, "*batch k"], sizes: Sequence[int]) -> Float[np.ndarray, "*batch width"]:
    """Level numbers as 0 and 1, one number for each level; unknown levels are all 0.

    Example:
        >>> one_hot(np.array([[1.0, 0.0]]), (2, 3)).tolist()
        [[0.0, 1.0, 1.0, 0.0, 0.0]]
    """
    parts = [codes[..., i, None] == np.arange(size) for i, size in enumerate(sizes)]
    return np.concatenate(parts, axis=-1).astype(float)


def encode_given(given: Sequence[Field], values: Float[np.ndarray, "*batch g"]) -> Float[np.ndarray, "*batch width"]:
    """Columns to condition on, as numbers, with categories as 0 and 1; raises if a level is unknown."""
    parts = []
    for place, field in enumerate(given):
        column = values[..., place, None]
        if field.kind == "category":
            check_levels(field, column)
        parts.append(one_hot(column, (field.width,)) if field.kind == "category" else column)
    return np.concatenate(parts, axis=-1)


def check_levels(field: Field, codes: Real[np.ndarray, "*n"]) -> None:
    """Raises if a level is unknown."""
    if (codes < 0).any():
        known = ", ".join(map(str, field.levels))[:200]
        raise ValueError(f"Expected levels of {field.name!r} that were seen ({known}); got another.")


def check_missing(
    names: Sequence[str | int], values: Float[np.ndarray, "n columns"], hint: str = "Leave these rows out."
) -> None:
    """Raises if a value is missing, and names the columns."""
    counts = np.isnan(values).sum(axis=0)
    if counts.any():
        found = ", ".join(f"{name!r} ({n})" for name, n in zip(names, counts, strict=True) if n)
        raise ValueError(f"Expected no missing values; got some in columns {found}. {hint}")


def _is_missing(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind in "mM":
        return np.isnat(values)
    if values.dtype.kind in "iubUS":
        return np.zeros(values.shape, bool)
    # NaN is the one value that differs from itself; pandas' NA compares to NA.
    return np.array([v is None or type(v).__name__ in ("NAType", "NaTType") or v != v for v in values], bool)
