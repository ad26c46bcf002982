"""Tables in files: CSV, NumPy arrays and Parquet, read column by column, and written atomically."""

import csv
import dataclasses
import io
import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from jaxtyping import Float, Shaped

from ddnf.system.files import check_overwrite, open_atomic
from ddnf.system.optional import require


@dataclasses.dataclass(frozen=True)
class Table:
    """A table in a file. Only the names of its columns have been read.

    Attributes:
        path: the file.
        names: of its columns; None if the file has no header.
        width: number of columns.
        load: reads the columns with these numbers.
    """

    path: Path
    names: tuple[str, ...] | None
    width: int
    load: Callable[[list[int]], np.ndarray]

    def label(self, number: int) -> str | int:
        return number if self.names is None else self.names[number]

    def read(self, numbers: list[int]) -> Float[np.ndarray, "rows columns"]:
        """The columns with these numbers, in that order; every value has to be finite."""
        values = self.load(numbers)
        if not len(values):
            raise ValueError(f"Expected rows of numbers in {str(self.path)!r}; got none.")
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            raise self.error("a missing value, NaN or infinity", int(bad[0][0]) + 1, numbers[int(bad[0][1])])
        return values

    def error(self, what: str, row: int, number: int) -> ValueError:
        """The error for a value that is not a finite number."""
        place = f"row {row}, column {self.label(number)!r} of {str(self.path)!r}"
        return ValueError(f"Expected numbers; got {what} in {place}.")


def open_table(path: Path) -> Table:
    """Opens a table in a .csv, .tsv, .npy or .parquet file. Errors count rows from 1, without the header.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.csv")
        >>> _ = path.write_text("id,x,y\\nfirst,1,2\\nsecond,3,4\\n")
        >>> table = open_table(path)
        >>> table.names, table.read([2, 1]).tolist()
        (('id', 'x', 'y'), [[2.0, 1.0], [4.0, 3.0]])
    """
    opener = _by_ending(path, READERS)
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise ValueError(f"Expected a table; got {str(path)!r}, which {what}.")
    return opener(path)


def write_table(
    path: Path | None,
    values: Shaped[np.ndarray, "rows columns"],
    names: Sequence[str] | None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes a table in the format of the file's ending: all of it, or nothing if that fails.

    Args:
        path: the file to write; None for CSV on standard output.
        values: the rows.
        names: of the columns; None for a table without a header.
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
    write = _by_ending(path, _WRITERS)
    if not overwrite:
        check_overwrite(path, hint="Pass overwrite=True to replace it.")
    with open_atomic(path) as file:
        write(file, values, names)


def check_ending(path: Path) -> None:
    """Raises if tables cannot be written to a file with this ending."""
    if _by_ending(path, _WRITERS) is _write_parquet:
        require("pyarrow", "parquet")


def _open_lines(path: Path) -> Table:
    first = next(_lines(path), None)
    if first is None:
        raise ValueError(f"Expected a table in {str(path)!r}; got an empty file.")
    is_header = any(cell.strip() and as_number(cell) is None for cell in first)
    names = tuple(cell.strip() for cell in first) if is_header else None
    _check_names(path, names or ())

    def load(numbers):
        values, lines = array("d"), _lines(path)
        if is_header:
            next(lines)
        for row, cells in enumerate(lines, start=1):
            if len(cells) != len(first):
                place = f"row {row} of {str(path)!r}"
                raise ValueError(f"Expected {len(first)} columns in each row; got {len(cells)} in {place}.")
            for number in numbers:
                value = as_number(cells[number])
                if value is None:
                    raise table.error(repr(cells[number][:40]), row, number)
                values.append(value)
        return np.asarray(values).reshape(-1, len(numbers))

    table = Table(path, names, len(first), load)
    return table


def _lines(path: Path):
    """The cells of each line that is not blank."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            start = file.readline()
            delimiter = max(",\t;", key=lambda mark: len(next(csv.reader([start], delimiter=mark), [])))
            yield from (cells for cells in csv.reader(chain([start], file), delimiter=delimiter) if cells)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"Expected text in UTF-8 in {str(path)!r}; got something else: {error}.") from error


def as_number(cell: str) -> float | None:
    """The number in a cell, or None.

    Example:
        >>> as_number("1e3"), as_number("many")
        (1000.0, None)
    """
    try:
        return float(cell)
    except ValueError:
        return None


def _check_names(path: Path, names: Sequence[str]) -> None:
    for name in filter(None, names):
        if names.count(name) > 1:
            raise ValueError(f"Expected a name for each column of {str(path)!r}; got {name!r} twice.")


def _open_array(path: Path) -> Table:
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
    return Table(path, None, values.shape[1], lambda numbers: values[:, numbers].astype(float))


def _open_parquet(path: Path) -> Table:
    parquet = require("pyarrow.parquet", "parquet")
    file = parquet.ParquetFile(path)
    names = tuple(file.schema_arrow.names)
    _check_names(path, names)

    def load(numbers):
        columns = []
        for number in numbers:
            column = file.read(columns=[names[number]]).column(0).to_numpy()
            if column.dtype.kind not in "biuf":
                raise table.error(f"{file.schema_arrow.types[number]}", 1, number)
            columns.append(column.astype(float))
        return np.stack(columns, axis=1)

    table = Table(path, names, len(names), load)
    return table


def _write_lines(file, values, names, delimiter: str) -> None:
    if names is not None:
        csv.writer(file, delimiter=delimiter, lineterminator="\n").writerow(names)
    # Enough digits to read exactly the same numbers again.
    np.savetxt(file, values, "%.9g" if values.dtype == np.float32 else "%.17g", delimiter)


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
    names = names or [str(number) for number in range(values.shape[1])]
    parquet.write_table(arrow.table(dict(zip(names, values.T.copy(), strict=True))), file)


READERS = {".csv": _open_lines, ".tsv": _open_lines, ".npy": _open_array, ".parquet": _open_parquet}
_WRITERS = {".csv": _write_csv, ".tsv": _write_tsv, ".npy": _write_array, ".parquet": _write_parquet}


def _by_ending(path: Path, functions: dict[str, Callable]) -> Callable:
    if path.suffix.lower() not in functions:
        raise ValueError(f"Expected a file that ends in {', '.join(functions)}; got {str(path)!r}.")
    return functions[path.suffix.lower()]
