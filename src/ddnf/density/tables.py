"""Tables in files: CSV, Excel, NumPy arrays and Parquet, read column by column, and written atomically."""

import csv
import dataclasses
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from tqdm.auto import tqdm

from ddnf.density.disk import DiskTable, open_columns, open_rows
from ddnf.density.lines import DATE, MISSING, Format, read_cells, sheet_lines, text_lines
from ddnf.density.schema import Field
from ddnf.system.files import check_overwrite, open_atomic
from ddnf.system.optional import require
from ddnf.system.parquet import column_values, open_dataset


@dataclasses.dataclass(frozen=True)
class Table:
    """A table in a file. Only the names of its columns have been read.

    Attributes:
        path: the file.
        names: of its columns; None if the file has no header.
        width: number of columns.
        load: reads the columns with these numbers: NumPy arrays of numbers, text, booleans or dates; with a progress
            bar if the second argument is True and the file is text. The third says what they hold, where it is known.
        disk: the columns with these numbers, and those to condition on, left on disk; None for text files and Excel.
    """

    path: Path
    names: tuple[str, ...] | None
    width: int
    load: Callable[[list[int], bool, Sequence[Field]], list[np.ndarray]]
    disk: Callable[[list[int], list[int]], DiskTable] | None = None

    def label(self, number: int) -> str | int:
        return number if self.names is None else self.names[number]

    def name(self, number: int) -> str:
        """What a model calls a column, so that it is found again in a file without names."""
        return f"column {number}" if self.names is None else self.names[number]

    def read(self, numbers: list[int], *, missing: str = "raise") -> Float[np.ndarray, "rows columns"]:
        """The columns with these numbers, in that order; every value has to be a finite number."""
        return self.as_array(numbers, self.read_columns(numbers, missing=missing))

    def as_array(self, numbers: list[int], values: list[np.ndarray]) -> Float[np.ndarray, "rows columns"]:
        """Columns that were read as one array; raises if one holds no numbers."""
        for column, number in zip(values, numbers, strict=True):
            if column.dtype.kind not in "biuf":
                raise self.error(f"{column[0]!r:.40}", 1, number)
        return np.stack(values, axis=1).astype(float)

    def read_columns(
        self, numbers: list[int], *, missing: str = "raise", progress: bool = False, fields: Sequence[Field] = ()
    ) -> list[np.ndarray]:
        """The columns with these numbers. Rows with missing values raise an error ("raise"), or are dropped or kept.

        With the `fields` of a model, cells are read as the types that were fitted, otherwise as the file suggests.
        """
        return self.read_complete(numbers, missing=missing, progress=progress, fields=fields)[0]

    def read_complete(
        self, numbers: list[int], *, missing: str = "raise", progress: bool = False, fields: Sequence[Field] = ()
    ) -> tuple[list[np.ndarray], Bool[np.ndarray, " rows"]]:
        """The columns, and which rows of the file were kept."""
        values = self.load(numbers, progress, fields)
        count = len(values[0])
        if not count:
            raise ValueError(f"Expected rows of numbers in {str(self.path)!r}; got none.")
        if missing == "keep":
            return values, np.ones(count, bool)
        lost = np.stack([_is_missing(column) for column in values], axis=1)
        infinite = np.stack([_is_infinite(column) for column in values], axis=1)
        kept = np.asarray(~lost.any(axis=1) if missing == "drop" else np.ones(count, bool))
        bad = (lost | infinite) & kept[:, None]
        if bad.any():
            row, place = np.argwhere(bad)[0]
            hint = " To leave such rows out, use --drop-missing." if lost[row, place] else ""
            raise self.error("a missing value, NaN or infinity", int(row) + 1, numbers[int(place)], hint)
        return [column[kept] for column in values], kept

    def error(self, what: str, row: int, number: int, hint: str = "") -> ValueError:
        """The error for a value that is not a finite number."""
        place = f"row {row}, column {self.label(number)!r} of {str(self.path)!r}"
        return ValueError(f"Expected numbers; got {what} in {place}.{hint}")


def _is_missing(column: np.ndarray) -> np.ndarray:
    if column.dtype.kind in "mM":
        return np.isnat(column)
    if column.dtype.kind == "O":
        return np.array([value is None for value in column], bool)
    return np.isnan(column)


def _is_infinite(column: np.ndarray) -> np.ndarray:
    return np.isinf(column) if column.dtype.kind == "f" else np.zeros(len(column), bool)


def open_table(path: Path, form: Format | None = None) -> Table:
    """Opens a table in a .csv, .tsv, .csv.gz, .xlsx, .npy or .parquet file, or in a folder of .parquet files.

    Errors count rows from 1, without the header. A column of text files and Excel holds numbers if its first value is
    one, else text, booleans (true, false) or dates (2020-12-31, with or without a time).

    Args:
        path: the file or folder.
        form: how it writes its values.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.csv")
        >>> _ = path.write_text("id,x,y\\nfirst,1,2\\nsecond,3,4\\n")
        >>> table = open_table(path)
        >>> table.names, table.read([2, 1]).tolist()
        (('id', 'x', 'y'), [[2.0, 1.0], [4.0, 3.0]])
    """
    if path.is_dir() and path.suffix.lower() not in {*READERS} - {".parquet"}:
        return _open_parquet(path, Format())
    opener = _by_ending(path, READERS)
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise ValueError(f"Expected a table; got {str(path)!r}, which {what}.")
    form = Format() if form is None else form
    form.check()
    return opener(path, form)


def write_table(
    path: Path | None,
    values: np.ndarray | Mapping[str, np.ndarray],
    names: Sequence[str] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes a table in the format of the file's ending: all of it, or nothing if that fails.

    Args:
        path: the file to write; None for CSV on standard output.
        values: the rows (n, columns), or a dict of columns.
        names: of the columns of an array; None for a table without a header.
        overwrite: whether a file that exists may be replaced.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.csv")
        >>> write_table(path, np.array([[1.0, 2.5]]), ("x", "y"))
        >>> path.read_text()
        'x,y\\n1,2.5\\n'
    """
    if path is None:
        _write_lines(sys.stdout, values, names, ",")
        return
    check_ending(path, mixed=isinstance(values, Mapping))
    write = _by_ending(path, _WRITERS)
    if not overwrite:
        check_overwrite(path, hint="Pass overwrite=True to replace it.")
    with open_atomic(path) as file:
        write(file, values, names)


def check_ending(path: Path, *, mixed: bool = False) -> None:
    """Raises if tables, or those of mixed columns, cannot be written to a file with this ending."""
    write = _by_ending(path, _WRITERS)
    if write is _write_parquet:
        require("pyarrow", "parquet")
    if mixed and write is _write_array:
        raise ValueError("Expected a .csv, .tsv or .parquet file for a table of mixed columns; got .npy.")


def _open_lines(lines: Callable, path: Path, form: Format) -> Table:
    first = next(lines(path, form), None)
    if first is None:
        raise ValueError(f"Expected a table in {str(path)!r}; got an empty file.")
    is_header = any(cell.strip().lower() not in MISSING and form.number(cell) is None for cell in first)
    names = tuple(cell.strip() for cell in first) if is_header else None
    _check_names(path, names or ())

    def fail(what, row, number, hint):
        if what:
            return table.error(what, row, number, hint)
        hint = " To leave out lines of comments, use --comment '#'." if first[0].startswith("#") else ""
        place = f"row {row} of {str(path)!r}"
        return ValueError(f"Expected {len(first)} columns in each row; got {number} in {place}.{hint}")

    def load(numbers, progress, fields):
        size = path.stat().st_size
        shown: dict[str, Any] = dict(
            desc="read", unit="B", unit_scale=True, leave=None, delay=1.0
        )  # none for small files
        with tqdm(total=size, disable=not progress, **shown) as bar:
            rest = lines(path, form, lambda place: bar.update(place - bar.n))
            if is_header:
                next(rest)
            columns = read_cells(rest, len(first), numbers, form, fail, fields)
            bar.update(size - bar.n)
        if names is not None:
            _check_header(path, [names[number] for number in numbers], columns, form)
        return columns

    table = Table(path, names, len(first), load)
    return table


def _check_names(path: Path, names: Sequence[str]) -> None:
    for name in filter(None, names):
        if names.count(name) > 1:
            raise ValueError(f"Expected a name for each column of {str(path)!r}; got {name!r} twice.")


def _check_header(path: Path, names: Sequence[str], columns: Sequence[np.ndarray], form: Format) -> None:
    """Raises if the first line is a row: numbers above numbers, dates above dates, and text that also occurs below."""
    kinds = [_kind(name, form) for name in names]
    fits = [
        kind == "missing" or (name in column if kind == "text" else kind == _kind_of(column))
        for name, kind, column in zip(names, kinds, columns, strict=True)
    ]
    if {*kinds} & {"number", "date", "boolean"} and {*kinds} != {"number"} and all(fits):
        raise ValueError(
            f"Expected names of columns in the first line of {str(path)!r}; got {', '.join(names)[:100]}, which looks "
            "like a row. Put a line with names before it."
        )


def _kind(cell: str, form: Format) -> str:
    if cell.lower() in MISSING:
        return "missing"
    if form.number(cell) is not None:
        return "number"
    return "date" if DATE.fullmatch(cell) else "boolean" if cell.lower() in ("true", "false") else "text"


def _kind_of(column: np.ndarray) -> str:
    if column.dtype.kind != "O":
        return "date" if column.dtype.kind == "M" else "number"
    return "boolean" if all(value is None or isinstance(value, bool) for value in column) else "text"


def _open_array(path: Path, form: Format) -> Table:
    try:
        values = np.load(path, allow_pickle=False, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"Expected an array of numbers in {str(path)!r}; got something else, or part of one."
        ) from error
    if not isinstance(values, np.ndarray):
        values.close()
        raise ValueError(f"Expected an array of numbers in {str(path)!r}; got several.")
    if values.dtype.kind not in "biuf" or values.ndim not in (1, 2):
        kind = f"{values.dtype} of shape {values.shape}"
        raise ValueError(f"Expected rows and columns of numbers in {str(path)!r}; got {kind}.")
    values = values if values.ndim == 2 else values[:, None]
    load = lambda numbers, *_: [values[:, i].astype(float) for i in numbers]  # noqa: E731
    return Table(path, None, values.shape[1], load, partial(open_columns, values))


def _open_parquet(path: Path, form: Format) -> Table:
    dataset = open_dataset(path)
    names = tuple(dataset.schema.names)
    _check_names(path, names)

    def load(numbers, *_):
        return [_as_floats(column_values(dataset.to_table([names[number]]).column(0))) for number in numbers]

    def disk(modelled, conditions):
        table = open_rows(dataset, [names[i] for i in conditions] or None, columns=[names[i] for i in modelled])
        return dataclasses.replace(table, load=lambda block: (_all_floats(table.load(block)[0]), None))

    return Table(path, names, len(names), load, disk)


def _all_floats(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: _as_floats(column) for name, column in columns.items()}


def _as_floats(column: np.ndarray) -> np.ndarray:
    """Numeric columns of any type as floats, so that all are read in the same way."""
    return column.astype(float) if column.dtype.kind in "iuf" else column


def _write_lines(file, values, names, delimiter: str) -> None:
    if isinstance(values, Mapping):
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow(values)
        writer.writerows(zip(*(_cells(column) for column in values.values()), strict=True))
        return
    if names is not None:
        csv.writer(file, delimiter=delimiter, lineterminator="\n").writerow(names)
    # Enough digits to read exactly the same numbers again.
    np.savetxt(file, values, "%.9g" if values.dtype == np.float32 else "%.17g", delimiter)


def _cells(column: np.ndarray) -> list[Any]:
    if column.dtype.kind == "M":
        is_day = bool((column == column.astype("datetime64[D]")).all())
        return np.datetime_as_string(column, "D" if is_day else "us").tolist()
    return [f"{value:.17g}" if isinstance(value, float) else value for value in column.tolist()]


def _write_csv(file, values, names, delimiter: str = ",") -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    _write_lines(text, values, names, delimiter)
    text.detach()  # flushes, and leaves the file open


def _write_tsv(file, values, names) -> None:
    _write_csv(file, values, names, "\t")


def _write_array(file, values, names) -> None:
    np.save(file, values)


def _write_parquet(file, values, names) -> None:
    arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    if not isinstance(values, Mapping):
        names = names or [str(number) for number in range(values.shape[1])]
        values = dict(zip(names, values.T.copy(), strict=True))
    parquet.write_table(arrow.table(dict(values)), file)


_open_text, _open_sheet = partial(_open_lines, text_lines), partial(_open_lines, sheet_lines)
READERS = {".csv": _open_text, ".tsv": _open_text, ".npy": _open_array, ".parquet": _open_parquet, ".xlsx": _open_sheet}
READERS |= {".csv.gz": _open_text, ".tsv.gz": _open_text}
_WRITERS = {".csv": _write_csv, ".tsv": _write_tsv, ".npy": _write_array, ".parquet": _write_parquet}


def _by_ending(path: Path, functions: dict[str, Callable]) -> Callable:
    ending = "".join(path.suffixes[-2:]).lower() if path.suffix.lower() == ".gz" else path.suffix.lower()
    if ending not in functions:
        raise ValueError(f"Expected a file that ends in {', '.join(functions)}; got {str(path)!r}.")
    return functions[ending]
