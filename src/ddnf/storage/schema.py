"""The columns of a table in a model file: names, types and levels as JSON, counts of categories as arrays."""

import math
from typing import Any

import numpy as np

from ddnf.density.categories import Categories
from ddnf.density.frames import LIBRARIES, is_dtype
from ddnf.density.result import Density
from ddnf.density.schema import KINDS, MOST_LEVELS, Field, Schema
from ddnf.system.checks import expect


def describe_schema(density: Density) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a file holds about the columns of a table, as JSON values and arrays."""
    schema, categories = density.schema, density.categories
    if schema is None:
        return {}, {}
    for field in (*schema.fields, *schema.given):
        _field([*field[:3], list(field.levels)])  # raises for what could not be read again
    described = dict(
        fields=[[*field[:3], list(field.levels)] for field in schema.fields],
        given=[[*field[:3], list(field.levels)] for field in schema.given],
        library=schema.library,
        strength=None if categories is None else categories.strength,
    )
    if categories is None:
        return dict(schema=described), {}
    arrays = {"categories.combinations": categories.combinations, "categories.counts": categories.counts}
    return dict(schema=described), {name: np.asarray(array, np.int64) for name, array in arrays.items()}


def restore_schema(header: Any, arrays: dict[str, np.ndarray]) -> tuple[Schema | None, Categories | None]:
    """The inverse of `describe_schema`; older files have no schema."""
    described = header.get("schema")
    if described is None:
        return None, None
    fields, given = (tuple(map(_field, described[name])) for name in ("fields", "given"))
    expect(described["library"] in LIBRARIES, "a known library", f"{described['library']!r:.60}")
    schema = Schema(fields, given, described["library"])
    expect(len(set(schema.names)) == len(schema.names), "a name for each column", f"{schema.names!r:.80}")
    if not schema.categories:
        return schema, None
    combinations, counts = (arrays[f"categories.{name}"] for name in ("combinations", "counts"))
    return schema, Categories(combinations, counts, schema.sizes, described["strength"])


def check_schema(density: Density) -> None:
    """Raises a ValueError unless the schema of a density fits its columns, and its counts are counts."""
    schema, categories = density.schema, density.categories
    assert schema is not None
    expect(density.names == schema.names, "the names of the columns", f"{density.names!r:.80}")
    expect(len(schema.numbers) == len(density.columns), f"{len(density.columns)} columns of numbers", "others")
    width = sum(schema.sizes) + sum(field.width for field in schema.given)
    found = 0 if density.condition_mean is None else len(density.condition_mean)
    expect(found == width, f"{width} conditions", f"{found}")
    expect(not (schema.categories and schema.given), "categories or conditions", "both")
    if categories is None:
        return
    rows, counts, sizes, strength = categories
    is_shape = rows.shape == (len(counts), len(sizes)) and counts.ndim == 1 and len(counts) > 0
    expect(is_shape and rows.dtype.kind == counts.dtype.kind == "i", "counts of categories", f"{rows.shape}")
    expect((rows >= 0).all() and (rows < np.array(sizes)).all(), "level numbers of categories", "others")
    expect((counts > 0).all() and counts.sum() < 2**53, "positive counts of categories", "others")
    is_number = type(strength) in (int, float) and math.isfinite(strength) and strength > 0
    expect(is_number, "a positive strength of the smoothing", f"{strength!r:.60}")


def _field(parts: Any) -> Field:
    name, kind, dtype, levels = parts
    is_text = isinstance(name, str) and isinstance(dtype, str) and kind in KINDS
    expect(is_text and is_dtype(dtype), "a column with a name, kind and type", f"{parts!r:.80}")
    is_plain = isinstance(levels, list) and all(type(level) in (str, int, float, bool) for level in levels)
    is_size = is_plain and (2 <= len(levels) <= MOST_LEVELS if kind == "category" else not levels)
    expect(is_size and len(set(levels)) == len(levels), "levels that differ", f"{levels!r:.80}")
    return Field(name, kind, dtype, tuple(levels))
