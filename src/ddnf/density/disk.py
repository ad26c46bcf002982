"""Tables on disk, read a block of rows at a time: NumPy memory maps, Parquet files and folders of them."""

import dataclasses
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ddnf.system.parquet import check_columns, column_values, is_numeric_type, open_dataset, row_groups

# Tables of up to this many bytes, as doubles, are read into memory.
IN_MEMORY = 2**27
BLOCK = 2**16  # rows of a memory map that are read at once
LARGEST_BLOCK = 2**28  # bytes of a row group


@dataclasses.dataclass(frozen=True)
class DiskTable:
    """A table in files, of which only the names and types of columns and the number of rows have been read.

    Attributes:
        sizes: rows of each block.
        width: number of columns, conditions included.
        load: reads a block: its columns, an array or a dict of arrays; and its conditions, an array or None.
        condition: names of the columns that are conditions, if all are in one dict.
        is_numeric: whether all columns hold numbers or dates. Other tables must fit in memory.
    """

    sizes: tuple[int, ...]
    width: int
    load: Callable[[int], tuple[Any, Any]]
    condition: tuple[str, ...] | None = None
    is_numeric: bool = True

    @property
    def is_small(self) -> bool:
        """Whether to read it into memory at once."""
        return not self.is_numeric or sum(self.sizes) * self.width * 8 <= IN_MEMORY

    def read(self) -> tuple[Any, Any]:
        """All rows, and their conditions or the names of these."""
        x, condition = joined([self.load(number) for number in range(len(self.sizes))])
        return x, condition if self.condition is None else list(self.condition)


def open_rows(x: Any, condition: Any = None, *, columns: Sequence[str] | None = None) -> DiskTable:
    """Opens a table on disk, for `fit_density`.

    Args:
        x: a .npy or .parquet file, a folder of .parquet files, a memory map of NumPy, or a dataset of PyArrow.
        condition: names of the columns of Parquet files to condition on; of arrays, an array or .npy file with as many
            rows.
        columns: names of the columns of Parquet files to model; None for all but the conditions.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.npy")
        >>> np.save(path, np.ones((100_000, 3)))
        >>> open_rows(path).sizes
        (65536, 34464)
    """
    if isinstance(x, str | PathLike):
        path = Path(x)
        if not path.exists():
            raise ValueError(
                f"Expected a .npy or .parquet file, or a folder of .parquet files; {str(x)!r} is not there."
            )
        x = np.load(path, mmap_mode="r", allow_pickle=False) if path.suffix.lower() == ".npy" else open_dataset(path)
    if isinstance(x, np.ndarray):
        return _open_array(x, np.load(condition, mmap_mode="r") if isinstance(condition, str | PathLike) else condition)
    return _open_dataset(x, condition, columns)


def on_disk(x: Any) -> bool:
    """Whether a table is on disk: a path, a memory map or a dataset of PyArrow.

    Example:
        >>> on_disk("a.parquet"), on_disk(np.ones((2, 2)))
        (True, False)
    """
    is_dataset = type(x).__module__.startswith("pyarrow") and hasattr(x, "get_fragments")
    return isinstance(x, str | PathLike | np.memmap | DiskTable) or is_dataset


def picked(table: Any, chosen: Any) -> Any:
    """Rows of an array, a dict of columns or a tuple of these, by a mask or by their numbers."""
    if table is None or isinstance(table, np.ndarray):
        return None if table is None else np.asarray(table[chosen])
    if isinstance(table, dict):
        return {name: column[chosen] for name, column in table.items()}
    return tuple(picked(part, chosen) for part in table)


def joined(parts: Sequence[Any]) -> Any:
    """Blocks of rows as one table."""
    first = parts[0]
    if first is None or isinstance(first, np.ndarray):
        return None if first is None else np.concatenate(parts)
    if isinstance(first, dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in first}
    return tuple(joined(several) for several in zip(*parts, strict=True))


def _open_array(x: np.ndarray, condition: Any) -> DiskTable:
    given = None if condition is None else np.asanyarray(condition)
    if x.ndim != 2 or 0 in x.shape or x.dtype.kind not in "biuf":
        raise ValueError(f"Expected x of numbers of shape (rows, columns); got {x.dtype} of shape {x.shape}.")
    if given is not None and (given.ndim != 2 or len(given) != len(x) or given.dtype.kind not in "biuf"):
        raise ValueError(f"Expected a condition of numbers for each of {len(x)} rows; got shape {given.shape}.")
    width = x.shape[1] + (0 if given is None else given.shape[1])
    return _in_blocks(len(x), width, lambda rows: (x[rows], None if given is None else given[rows]))


def open_columns(x: np.ndarray, modelled: Sequence[int], conditions: Sequence[int] = ()) -> DiskTable:
    """Columns of an array by their numbers, and others to condition on, as a table on disk.

    Example:
        >>> open_columns(np.arange(6.0).reshape(2, 3), [2, 0]).read()[0].tolist()
        [[2.0, 0.0], [5.0, 3.0]]
    """

    def read(rows):
        block = x[rows]
        return block[:, list(modelled)], block[:, list(conditions)] if conditions else None

    return _in_blocks(len(x), len(modelled) + len(conditions), read)


def _in_blocks(count: int, width: int, read: Callable[[slice], tuple[Any, Any]]) -> DiskTable:
    def load(number):
        rows, given = read(slice(number * BLOCK, (number + 1) * BLOCK))
        return np.asarray(rows, float), None if given is None else np.asarray(given, float)

    return DiskTable(tuple(min(BLOCK, count - first) for first in range(0, count, BLOCK)), width, load)


def _open_dataset(dataset: Any, condition: Any, columns: Sequence[str] | None) -> DiskTable:
    known = list(dataset.schema.names)
    check_columns(dataset)
    given = () if condition is None else (condition,) if isinstance(condition, str) else tuple(condition)
    names = [*(columns or [name for name in known if name not in given]), *given]
    unknown = [name for name in names if not (isinstance(name, str) and name in known)]
    if unknown:
        raise ValueError(f"Expected columns of the files ({', '.join(known)[:200]}); got {unknown[0]!r:.60}.")
    groups = row_groups(dataset)
    sizes = tuple(group.row_groups[0].num_rows for group in groups)

    def load(number):
        table = groups[number].to_table(columns=names, schema=dataset.schema)
        return {name: column_values(table.column(name)) for name in names}, None

    is_numeric = all(is_numeric_type(str(dataset.schema.field(name).type)) for name in names)
    found = DiskTable(sizes, len(names), load, given or None, is_numeric)
    most = LARGEST_BLOCK // (8 * len(names))
    if max(sizes) > most and not found.is_small:
        raise ValueError(
            f"Expected row groups of at most {most} rows, which are read at once; got {max(sizes)}. Write the files "
            f"again with row_group_size={min(most, 100_000)}."
        )
    return found
