"""Tables of other libraries: columns of pandas and polars frames and of dicts, and the same kind of table again."""

import datetime
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from jaxtyping import Float

from ddnf.density.schema import Field, Raw, Schema, decode
from ddnf.system.optional import require

_NUMBERS = int | float | np.number | Decimal
LIBRARIES = ("pandas", "polars", "columns", "array")
_DTYPES = re.compile(
    r"u?int(8|16|32|64)|U?Int(8|16|32|64|128)|[fF]loat(16|32|64)|bool|boolean|Boolean|object|str|string|String|"
    r"category(, ordered)?|Categorical|Enum|Date|Decimal|datetime64\[(s|ms|us|ns)(, [\w/+:-]{1,40})?\]|"
    r"timedelta64\[(s|ms|us|ns)\]|Datetime\[(ms|us|ns)(, [\w/+:-]{1,40})?\]|Duration\[(ms|us|ns)\]|<U|other"
)


def is_dtype(text: str) -> bool:
    """Whether `build_table` knows a type by this name.

    Example:
        >>> is_dtype("datetime64[ns, Europe/Paris]"), is_dtype("__import__")
        (True, False)
    """
    return _DTYPES.fullmatch(text) is not None


def library_of(x: Any) -> str | None:
    """Which kind of table with names this is; None for arrays and lists."""
    if isinstance(x, Mapping):
        return "columns"
    library = type(x).__module__.split(".")[0]
    return library if library in ("pandas", "polars") and hasattr(x, "columns") else None


def read_columns(x: Any) -> dict[str, Raw]:
    """The columns of a table with names.

    Example:
        >>> read_columns({"a": [1, 2], "b": ["x", None]})["b"].values.tolist()
        ['x', None]
    """
    library = library_of(x)
    read = {"pandas": _from_pandas, "polars": _from_polars, "columns": _from_values}[library or "columns"]
    if library != "pandas":
        return {str(name): _known(read(x[name])) for name in (x.columns if library == "polars" else x)}
    names = [str(name) for name in x.columns]
    if len(set(names)) < len(names):
        raise ValueError(f"Expected a name for each column; got {names!r:.200}.")
    return {name: _known(read(x.iloc[:, place])) for place, name in enumerate(names)}


def _known(raw: Raw) -> Raw:
    return raw if is_dtype(raw.dtype) else raw._replace(dtype="other")


def _type_name(dtype: Any) -> str:
    """The type of draws of a column: NumPy's in place of Arrow's, sparse and foreign ones; microseconds for odd units.

    Example:
        >>> _type_name(np.dtype(">f8")), _type_name(np.dtype("datetime64[M]")), _type_name(np.dtype("datetime64[ms]"))
        ('float64', 'datetime64[us]', 'datetime64[ms]')
    """
    name = str(dtype)
    if name.endswith("[pyarrow]"):
        dtype = dtype.numpy_dtype
    elif name.startswith("Sparse["):
        dtype = dtype.subtype
    if not isinstance(dtype, np.dtype):
        return name
    name = str(dtype.newbyteorder("="))
    return name.partition("[")[0] + "[us]" if dtype.kind in "mM" and not is_dtype(name) else name


def _in_zone(series: Any) -> tuple[Any, str]:
    """Times without a zone, in UTC, and their type; UTC in place of a zone that has no name that pandas knows."""
    unit, zone = getattr(series.dtype, "unit", "us"), str(series.dt.tz)
    try:
        series.dt.tz_convert(zone)
    except (KeyError, ValueError):
        zone = "UTC"
    dtype = f"datetime64[{unit}, {zone}]"
    return series.dt.tz_convert("UTC").dt.tz_localize(None), dtype if is_dtype(dtype) else f"datetime64[{unit}, UTC]"


def _from_pandas(series: Any) -> Raw:
    dtype = _type_name(series.dtype)
    if dtype == "category":
        levels = tuple(series.cat.categories.tolist())
        dtype = "category, ordered" if series.cat.ordered else "category"
        return Raw(series.astype(object).to_numpy(), dtype, levels)
    kind = getattr(series.dtype, "kind", "O")
    if kind in "iuf":
        return Raw(series.to_numpy(dtype=float, na_value=np.nan), dtype)
    if kind == "M":
        if getattr(series.dtype, "tz", None) is not None or ", tz=" in str(series.dtype):
            series, dtype = _in_zone(series)
        return Raw(series.astype("datetime64[us]").to_numpy(), dtype)
    if kind == "m":
        return Raw(series.astype("timedelta64[us]").to_numpy(), dtype)
    return _from_objects(series.astype(object).to_numpy(), dtype)


def _from_polars(series: Any) -> Raw:
    polars = require("polars", "frames")
    dtype, kind = series.dtype, str(series.dtype).partition("(")[0]
    if dtype.is_nested():
        raise ValueError(f"Expected one value in each cell; got {dtype} in column {series.name!r}.")
    if dtype.is_numeric():
        return Raw(series.cast(polars.Float64).to_numpy(), kind)
    if kind == "Date":
        return Raw(series.cast(polars.Datetime("us")).to_numpy(), kind)
    if kind == "Datetime":
        zone = "" if dtype.time_zone is None else f", {dtype.time_zone}"
        if zone:
            series = series.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        return Raw(series.to_numpy().astype("datetime64[us]"), f"Datetime[{dtype.time_unit}{zone}]")
    if kind == "Duration":
        return Raw(series.to_numpy().astype("timedelta64[us]"), f"Duration[{dtype.time_unit}]")
    levels = tuple(dtype.categories) if kind == "Enum" else None
    return Raw(np.array(series.to_list(), object), kind, levels)


def _from_values(values: Any) -> Raw:
    array = np.asarray(values)
    if array.ndim > 1:
        raise ValueError(f"Expected one value in each cell; got columns of shape {array.shape}.")
    if array.dtype.kind in "iufmM":
        return Raw(array, _type_name(array.dtype))
    objects = array if array.dtype.kind == "b" else np.array(values, object)
    raw = _from_objects(objects.ravel(), "bool" if array.dtype.kind == "b" else "object")
    return raw._replace(values=raw.values.reshape(array.shape))


def _from_objects(values: np.ndarray, dtype: str) -> Raw:
    """Objects of one kind as NumPy has it, where it has one."""
    several = next((v for v in values if isinstance(v, list | dict | set | np.ndarray)), None)
    if several is not None:
        raise ValueError(f"Expected one value in each cell; got {several!r:.60}.")
    known = [v for v in values if not (v is None or type(v).__name__ in ("NAType", "NaTType") or v != v)]
    if known and all(hasattr(v, "isoformat") and hasattr(v, "year") for v in known):  # dates and times of Python
        return Raw(np.array([_in_utc(v) for v in values], "datetime64[us]"), dtype)
    if known and all(isinstance(v, _NUMBERS) and not isinstance(v, bool | np.bool_) for v in known):
        return Raw(np.array([float(v) if isinstance(v, _NUMBERS) else np.nan for v in values]), dtype)
    return Raw(np.array([_plain(v) for v in values], object), dtype)


def _in_utc(value: Any) -> Any:
    if value is None or value != value:
        return "NaT"
    zone = getattr(value, "tzinfo", None)
    return value if zone is None else value.astimezone(datetime.UTC).replace(tzinfo=None)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def build_table(schema: Schema, rows: Float[np.ndarray, "n columns"], integer: Sequence[bool]) -> Any:
    """Rows of numbers as a table of the kind that was fitted, with its names, order and types.

    Example:
        >>> fields = Field("a", "number", "int64"), Field("b", "category", "object", ("x", "y"))
        >>> build_table(Schema(fields, library="columns"), np.array([[2.0, 1.0]]), [True, False])
        {'a': array([2]), 'b': array(['y'], dtype=object)}
    """
    columns = {}
    for place, field in enumerate(schema.fields):
        values = decode(field, rows[:, place])
        is_whole = integer[place] and field.kind == "number"
        columns[field.name] = np.clip(values, -(2.0**62), 2.0**62).astype(np.int64) if is_whole else values
    if schema.library == "columns":
        return columns
    if schema.library == "array":
        return np.stack(list(columns.values()), axis=1)
    build = _to_pandas if schema.library == "pandas" else _to_polars
    library = require(schema.library, "frames")
    return library.DataFrame({f.name: build(library, f, columns[f.name]) for f in schema.fields})


def _to_pandas(pandas: Any, field: Field, values: np.ndarray) -> Any:
    if field.dtype.startswith("category"):
        return pandas.Categorical(values, list(field.levels), ordered=field.dtype.endswith("ordered"))
    series = pandas.Series(values)
    if field.kind == "number":
        return series.astype(field.dtype) if _keeps_type(field, values) else series
    if field.kind in ("day", "time") and "," in field.dtype:
        zone = field.dtype.partition(", ")[2].rstrip("]")
        return series.dt.tz_localize("UTC").dt.tz_convert(zone).astype(field.dtype)
    is_free = field.dtype == "other" or (field.dtype == "object" and field.kind != "category")
    return series if is_free else series.astype(field.dtype)


def _to_polars(polars: Any, field: Field, values: np.ndarray) -> Any:
    if field.kind == "category":
        kind = polars.Enum(list(field.levels)) if field.dtype == "Enum" else getattr(polars, field.dtype, None)
        return polars.Series(values.tolist(), dtype=kind)
    series = polars.Series(values)
    if field.kind == "number":
        return series.cast(getattr(polars, field.dtype)) if _keeps_type(field, values) else series
    if field.dtype == "Date":
        return series.cast(polars.Date)
    kind, _, rest = field.dtype.rstrip("]").partition("[")
    unit, _, zone = rest.partition(", ")
    if zone:
        series = series.dt.replace_time_zone("UTC").dt.convert_time_zone(zone)
    return series.dt.cast_time_unit(unit) if kind in ("Datetime", "Duration") else series


def _keeps_type(field: Field, values: np.ndarray) -> bool:
    """Whether draws fit in the type of the column: integers in one of integers, reals in one of reals."""
    name = field.dtype.lower()
    if "int" not in name:
        return name.startswith("float")
    if values.dtype.kind != "i":
        return False
    limits = np.iinfo(name) if name != "int128" else np.iinfo("int64")
    return bool(limits.min <= values.min() and values.max() <= limits.max) if len(values) else True
