"""Parquet files: datasets of PyArrow, their row groups, and their columns as arrays that stay on disk."""

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ddnf.system.optional import require


class ParquetColumn:
    """A column of Parquet files that behaves like an array and stays on disk: rows are read when they are indexed.

    The row group that was read last is kept, so that consecutive slices read each group once.
    """

    def __init__(self, groups: list[Any], name: str, schema: Any):
        self._groups, self._name, self._schema = groups, name, schema
        self._ends = np.cumsum([group.row_groups[0].num_rows for group in groups])
        self._latest: tuple[int, np.ndarray] | None = None

    @property
    def shape(self) -> tuple[int]:
        return (int(self._ends[-1]),)

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        rows = np.arange(*rows.indices(self.shape[0])) if isinstance(rows, slice) else np.asarray(rows)
        numbers = np.searchsorted(self._ends, rows, side="right")
        read = {int(number): numbers == number for number in np.unique(numbers)}
        found = np.zeros(len(rows), self._read(next(iter(read), 0)).dtype)
        for number, chosen in read.items():
            values = self._read(number)
            found[chosen] = values[rows[chosen] - (self._ends[number] - len(values))]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype)

    def _read(self, number: int) -> np.ndarray:
        if self._latest is None or self._latest[0] != number:
            column = self._groups[number].to_table(columns=[self._name], schema=self._schema).column(self._name)
            values = column_values(column)
            if column.null_count or values.dtype.kind not in "biuf":
                found = "missing values" if column.null_count else str(column.type)
                raise ValueError(f"Expected numbers in column {self._name!r} of the Parquet files; got {found}.")
            self._latest = number, values
        return self._latest[1]


def open_columns(data: str | PathLike | Any) -> dict[str, ParquetColumn]:
    """The columns of a Parquet file, a folder of them, or a PyArrow dataset, by name."""
    dataset = open_dataset(Path(data)) if isinstance(data, str | PathLike) else data
    check_columns(dataset)
    groups = row_groups(dataset)
    return {name: ParquetColumn(groups, name, dataset.schema) for name in dataset.schema.names}


def is_dataset(data: Any) -> bool:
    """Whether data is a path or a PyArrow dataset."""
    return isinstance(data, str | PathLike) or type(data).__module__ == "pyarrow._dataset"


def row_groups(dataset: Any) -> list[Any]:
    """The row groups of all files that have rows; raises if there are none."""
    groups = [group for fragment in dataset.get_fragments() for group in fragment.split_by_row_group()]
    groups = [group for group in groups if group.row_groups[0].num_rows]
    if not groups:
        raise ValueError("Expected rows in the Parquet files; got none.")
    return groups


def parquet_files(path: Path) -> list[Path]:
    """A Parquet file, or all Parquet files below a folder; raises if one is empty or there is none.

    Example:
        >>> parquet_files(Path("a.parquet"))
        [PosixPath('a.parquet')]
    """
    if not path.is_dir():
        return [path]
    files = [file for file in sorted(path.rglob("*.parquet")) if not file.name.startswith((".", "_"))]
    if not files:
        raise ValueError(f"Expected .parquet files in the folder {str(path)!r}; got none.")
    for file in files:
        if not file.stat().st_size:
            raise ValueError(f"Expected Parquet files; got {str(file)!r}, which is empty.")
    return files


def open_dataset(path: Path) -> Any:
    """The PyArrow dataset of a Parquet file or of a folder of them; raises if these disagree on columns."""
    arrow, datasets = require("pyarrow", "parquet"), require("pyarrow.dataset", "parquet")
    if not path.is_dir() and path.suffix.lower() != ".parquet":
        raise ValueError(f"Expected a .npy or .parquet file, or a folder of .parquet files; got {str(path)!r}.")
    files = [str(file) for file in parquet_files(path)]
    try:
        dataset = datasets.dataset(files, format="parquet")
    except arrow.ArrowInvalid as error:
        raise ValueError(f"Expected Parquet files in {str(path)!r}; got something else, or part of one.") from error
    check_columns(dataset)
    return dataset


def check_columns(dataset: Any) -> None:
    """Raises if the files of a dataset have different columns."""
    known = dataset.schema.names
    for fragment in dataset.get_fragments():
        odd = sorted({*known} ^ {*fragment.physical_schema.names})
        if odd:
            raise ValueError(
                f"Expected files with the same columns; {str(fragment.path)!r} differs from others in {odd[0]!r}."
            )


def is_numeric_type(kind: str) -> bool:
    """Whether a PyArrow type holds numbers or dates."""
    return kind.startswith(("int", "uint", "float", "double", "halffloat", "decimal", "date", "timestamp", "duration"))


def column_values(column: Any) -> np.ndarray:
    """A column of PyArrow: numbers and dates as NumPy has them, text and booleans as objects."""
    values = column.to_numpy()
    if values.dtype.kind in "mM":
        return values.astype(f"{'datetime' if values.dtype.kind == 'M' else 'timedelta'}64[us]")
    if values.dtype.kind in "iuf":
        return values
    if str(column.type).startswith("decimal"):
        return values.astype(float)
    found = np.empty(len(values), object)
    found[:] = column.to_pylist()
    return found
