"""Converts a user's table to the inputs of a fit: rows of numbers, conditions, and level numbers of categories."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from ddnf.density import rows as rows_of
from ddnf.density.columns import NAMED, Column, Support, columns_from
from ddnf.density.frames import library_of, read_columns
from ddnf.density.schema import Field, Raw, Schema, check_missing, encode_given, encode_table, field_of, one_hot


class Prepared(NamedTuple):
    """A table that can be fitted.

    Attributes:
        rows: columns of numbers.
        given: conditions as numbers: levels of the categories as 0 and 1, and then the user's own; None without.
        codes: level numbers of the categories; None without.
        columns: support of each column of numbers.
        names: of all columns and then of the conditions, where they are known.
        schema: what the columns are; None for arrays.
        dropped: number of rows dropped because of missing values.
    """

    rows: Float[np.ndarray, "n dim"]
    given: Float[np.ndarray, "n condition"] | None
    codes: Int[np.ndarray, "n k"] | None
    columns: tuple[Column, ...]
    names: tuple[str, ...] | None
    schema: Schema | None
    dropped: int

    @property
    def number_names(self) -> tuple[str, ...] | None:
        """Names of the columns of numbers."""
        if self.schema is None:
            return None if self.names is None else self.names[: self.rows.shape[1]]
        return tuple(self.schema.fields[i].name for i in self.schema.numbers)


def prepare(
    x: Any, condition: Any, *, support: Support = None, names: Sequence[str] | None = None, missing: str = "raise"
) -> Prepared:
    """A table, checked and as numbers; see `fit_density` for the arguments.

    Example:
        >>> table = {"price": np.arange(12.0), "kind": ["a", "b"] * 6}
        >>> prepared = prepare(table, None)
        >>> prepared.rows.shape, prepared.codes.shape, prepared.given.shape
        ((12, 1), (12, 1), (12, 2))
    """
    if missing not in ("raise", "drop"):
        raise ValueError(f"Expected missing to be 'raise' or 'drop'; got {missing!r}.")
    if library_of(x) is None and library_of(condition) is None:
        prepared = _from_arrays(x, condition, support, names, missing)
    else:
        prepared = _from_tables(x, condition, support, names, missing)
    rows_of.check_rows(prepared.rows, prepared.columns, prepared.number_names)
    return prepared


def _from_arrays(x, condition, support, names, missing) -> Prepared:
    dropped = 0
    if missing == "drop":
        x, condition, dropped = _without_missing(rows_of.numbers(x, "x"), condition)
    rows = rows_of.finite_rows(x, "x")
    given = None if condition is None else rows_of.conditions(condition, len(rows))
    names = rows_of.check_names(names, rows.shape[1] + (0 if given is None else given.shape[1]))
    return Prepared(rows, given, None, columns_from(support, rows.shape[1], names), names, None, dropped)


def _without_missing(rows, condition):
    given = None if condition is None else rows_of.numbers(condition, "condition")
    if rows.ndim != 2 or (given is not None and (given.ndim != 2 or len(given) != len(rows))):
        return rows, condition, 0  # refused later, with a better message
    has_all = ~np.isnan(rows).any(axis=1) & (True if given is None else ~np.isnan(given).any(axis=1))
    return rows[has_all], None if given is None else given[has_all], int((~has_all).sum())


def _from_tables(x, condition, support, names, missing) -> Prepared:
    library = library_of(x) or "array"
    table = read_columns(x) if library != "array" else _named(rows_of.finite_rows(x, "x"), names)
    if library != "array" and names is not None:
        raise ValueError("Expected names for arrays only; the table has names of its own.")
    table, conditions = _split(table, condition)
    if not table:
        raise ValueError("Expected at least one column to model; got none.")
    for name, raw in (table | conditions).items():
        if raw.values.ndim != 1:
            raise ValueError(f"Expected a list of values in column {name!r}; got {raw.values!r:.40}.")
    schema = Schema(
        tuple(field_of(name, raw) for name, raw in table.items()),
        tuple(field_of(name, raw) for name, raw in conditions.items()),
        library,
    )
    lengths = {len(raw.values) for raw in (*table.values(), *conditions.values())}
    if len(lengths) > 1:
        raise ValueError(f"Expected columns of one length, and a condition for each row; got {sorted(lengths)}.")
    values = encode_table((*schema.fields, *schema.given), table | conditions)
    has_all = ~np.isnan(values).any(axis=1)
    if missing == "drop":
        values = values[has_all]
    check_missing(schema.names, values, "Pass missing='drop' to leave these rows out.")
    return _of_schema(schema, values, support, int((~has_all).sum()))


def _split(table: dict[str, Raw], condition: Any) -> tuple[dict[str, Raw], dict[str, Raw]]:
    """Columns to model and columns to condition on: a table of its own, or names of columns of the first."""
    if condition is None:
        return table, {}
    chosen = [condition] if isinstance(condition, str) else condition
    if isinstance(chosen, Sequence) and chosen and all(isinstance(name, str) for name in chosen):
        unknown = [name for name in chosen if name not in table]
        if unknown:
            raise ValueError(f"Expected columns of the table as conditions; got {unknown[0]!r}.")
        rest = {name: raw for name, raw in table.items() if name not in chosen}
        return rest, {name: table[name] for name in chosen}
    if library_of(condition) is None:
        array = rows_of.finite_rows(condition, "condition")
        return table, _named(array, [f"condition {i}" for i in range(array.shape[1])])
    conditions = read_columns(condition)
    twice = [name for name in conditions if name in table]
    if twice:
        raise ValueError(f"Expected other columns as conditions than those modelled; got {twice[0]!r} in both.")
    return table, conditions


def _named(rows: np.ndarray, names: Sequence[str] | None) -> dict[str, Raw]:
    names = rows_of.check_names(names, rows.shape[1]) or [str(i) for i in range(rows.shape[1])]
    return {name: Raw(column, "float64") for name, column in zip(names, rows.T, strict=True)}


def _of_schema(schema: Schema, values: np.ndarray, support: Support, dropped: int) -> Prepared:
    fields, numbers, categories = schema.fields, schema.numbers, schema.categories
    if not numbers:
        raise ValueError("Expected at least one column of numbers to model; got categories only.")
    if categories and schema.given:
        raise ValueError(
            f"Expected numbers to model given a condition; got the category {fields[categories[0]].name!r}: use it as "
            "a condition too, or fit a density without a condition."
        )
    _check_finite((*fields, *schema.given), values)
    columns = columns_from(_with_types(support, fields, values), len(fields), [field.name for field in fields])
    codes = values[:, categories].astype(int) if categories else None
    parts = [one_hot(codes, schema.sizes)] if codes is not None else []
    if schema.given:
        parts.append(encode_given(schema.given, values[:, len(fields) :]))
        _check_varies(schema.given, values[:, len(fields) :])
    given = np.concatenate(parts, axis=1) if parts else None
    return Prepared(values[:, numbers], given, codes, tuple(columns[i] for i in numbers), schema.names, schema, dropped)


def _with_types(support: Support, fields: Sequence[Field], values: np.ndarray) -> Any:
    """The user's support, and "integer" for columns of an integer type without one."""
    if support is not None and not isinstance(support, Mapping):
        return support
    known = dict(support or {})
    for key in known:
        named = [f for i, f in enumerate(fields) if key in (i, f.name) and f.kind == "category"]
        if named:
            raise ValueError(f"Expected the support of columns of numbers; got {named[0].name!r}, a category.")
    found: dict[Any, Any] = {}
    for i, field in enumerate(fields):
        if i in known or field.name in known:
            continue
        is_integer = field.kind == "day" or (field.kind == "number" and "int" in field.dtype.lower())
        if is_integer and (values[:, i] == np.floor(values[:, i])).all():
            found[i] = "count" if field.kind == "number" and values[:, i].min() >= 0 else "integer"
    assert all(spec in NAMED for spec in found.values())
    return known | found


def _check_finite(fields: Sequence[Field], values: np.ndarray) -> None:
    bad = np.flatnonzero(np.isinf(values).any(axis=0))
    if len(bad):
        raise ValueError(f"Expected finite values; got infinity in column {fields[bad[0]].name!r}.")


def _check_varies(fields: Sequence[Field], values: np.ndarray) -> None:
    constant = np.flatnonzero(np.ptp(values, axis=0) == 0)
    if len(constant):
        raise ValueError(f"Expected conditions that vary; {fields[constant[0]].name!r} has one value only.")
