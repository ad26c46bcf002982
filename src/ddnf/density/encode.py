"""Converts rows and conditions to numbers, for queries of a fitted density."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from ddnf.density import rows as rows_of
from ddnf.density.frames import library_of, read_columns
from ddnf.density.schema import Field, Raw, Schema, check_missing, encode_given, encode_table


def encode_rows(schema: Schema | None, dim: int, x: Any, condition: Any) -> tuple[Any, Any, Any]:
    """Columns of numbers (..., numbers), level numbers (..., categories), and conditions, the last two None without.

    Columns of a table are found by name; conditions too, if the table has them and `condition` is None.

    Example:
        >>> schema = Schema((Field("a"), Field("b", "category", "str", ("x", "y"))), library="columns")
        >>> numbers, codes, _ = encode_rows(schema, 2, {"a": [1.0, 2.0], "b": ["y", "x"]}, None)
        >>> numbers.tolist(), codes.tolist()
        ([[1.0], [2.0]], [[1], [0]])
    """
    if schema is None:
        return _numbers(x, list(range(dim))), None, condition
    is_table = library_of(x) is not None
    if is_table and condition is None and schema.given:
        condition = x
    given = encode_condition(schema, condition)
    if not is_table and not schema.categories:
        return _numbers(x, [field.name for field in schema.fields]), None, given
    values = encode_fields(schema.fields, x)
    codes = values[..., schema.categories].astype(int) if schema.categories else None
    return values[..., schema.numbers], codes, given


def _numbers(x: Any, names: Sequence[str | int]) -> Any:
    """Rows of an array, without missing values; tracers stay as they are."""
    found = rows_of.table(x, len(names), "x")
    if not isinstance(found, Tracer):
        check_missing(names, found.reshape(-1, len(names)))
    return found


def encode_condition(schema: Schema | None, condition: Any) -> Any:
    """Conditions as numbers, with categories as 0 and 1."""
    if schema is None or condition is None or not schema.given or isinstance(condition, Tracer):
        return condition
    return encode_given(schema.given, encode_fields(schema.given, condition))


def encode_fields(fields: Sequence[Field], x: Any) -> np.ndarray:
    """The fields of a table as numbers (n, fields); of rows (..., fields) without names, by their order."""
    values = encode_table(fields, _columns(fields, x))
    check_missing([field.name for field in fields], values)
    return values if library_of(x) is not None else values.reshape(*np.shape(x)[:-1], len(fields))


def _columns(fields: Sequence[Field], x: Any) -> dict[str, Raw]:
    if isinstance(x, Mapping):
        return {name: raw._replace(values=np.atleast_1d(raw.values)) for name, raw in read_columns(x).items()}
    if library_of(x) is not None:
        return read_columns(x)
    array = np.asarray(x) if all(field.kind == "number" for field in fields) else np.array(x, object)
    if array.shape[-1:] != (len(fields),):
        raise ValueError(f"Expected rows with {', '.join(f.name for f in fields)[:200]}; got shape {array.shape}.")
    flat = array.reshape(-1, len(fields))
    return {field.name: Raw(flat[:, place], field.dtype) for place, field in enumerate(fields)}
