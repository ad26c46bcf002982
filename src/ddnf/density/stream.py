"""Training on rows on disk: one pass checks and samples them, and then a stream shuffles them.

In each epoch, blocks of rows are read in random order. A window of a few blocks is in memory at a time, and its rows
are shuffled. The window bounds the memory, whatever the size of the files.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, PyTree

from ddnf.density.disk import DiskTable, joined, picked

WINDOW = 2**27  # bytes of rows in memory, as they are trained with


class Survey(NamedTuple):
    """The result of one pass over a table.

    Attributes:
        x, condition: some of the rows, drawn at random without replacement and in random order.
        places: block and number in it of each of these rows.
        counts: rows of each block, without those that were dropped.
        dropped: rows left out because a value was missing.
        extremes: smallest and largest value of each column.
    """

    x: Any
    condition: Any
    places: Int[np.ndarray, "n 2"]
    counts: Int[np.ndarray, " blocks"]
    dropped: int
    extremes: Float[np.ndarray, "2 columns"]


def survey(rng: np.random.Generator, table: DiskTable, size: int, *, missing: str) -> Survey:
    """Passes over all rows: checks that they are finite, and draws `size` of them.

    Each row gets a random number; those with the smallest are kept, so that the number of rows need not be known.

    Example:
        >>> from ddnf.density.disk import open_rows
        >>> found = survey(np.random.default_rng(0), open_rows(np.ones((50, 2))), 10, missing="raise")
        >>> found.x.shape, int(found.counts.sum())
        ((10, 2), 50)
    """
    kept, limit, counts, ends = [], 1.0, [], []
    for block in range(len(table.sizes)):
        rows = load(table, block, missing)
        values = _numbers(rows)
        counts.append(len(values))
        if not len(values):
            continue
        _check_finite(values, rows)
        ends.append([values.min(axis=0), values.max(axis=0)])
        luck = rng.random(len(values))
        chosen = np.flatnonzero(luck < limit)
        kept.append((luck[chosen], np.stack([np.full(len(chosen), block), chosen], axis=1), picked(rows, chosen)))
        if sum(len(part[0]) for part in kept) > 2 * size:
            kept = [_luckiest(kept, size)]
            limit = float(kept[0][0][-1])
    if not kept:
        raise ValueError("Expected rows without missing values; got none.")
    _, places, (x, condition) = _luckiest(kept, size)
    extremes = np.array([np.min([low for low, _ in ends], axis=0), np.max([high for _, high in ends], axis=0)])
    return Survey(x, condition, places, np.array(counts), sum(table.sizes) - sum(counts), extremes)


def _luckiest(kept, size):
    luck, places, rows = joined(kept)
    order = np.argsort(luck, kind="stable")[:size]
    return picked((luck, places, rows), order)


def load(table: DiskTable, block: int, missing: str) -> tuple[Any, Any]:
    """A block of rows and conditions, without rows in which a value is missing if these are to be dropped."""
    rows = table.load(block)
    if missing != "drop":
        return rows
    has_all = ~np.isnan(_numbers(rows)).any(axis=1)
    return rows if has_all.all() else picked(rows, has_all)


def _numbers(rows: tuple[Any, Any]) -> Float[np.ndarray, "n columns"]:
    x, condition = rows
    columns = [_floats(column) for column in x.values()] if isinstance(x, dict) else [*x.T]
    return np.stack([*columns, *([] if condition is None else condition.T)], axis=1)


def _floats(column: np.ndarray) -> np.ndarray:
    if column.dtype.kind not in "mM":
        return column.astype(float)
    return np.where(np.isnat(column), np.nan, column.astype(np.int64).astype(float))


def _check_finite(values, rows):
    bad = np.flatnonzero(~np.isfinite(values).all(axis=0))
    if len(bad):
        names = list(rows[0]) if isinstance(rows[0], dict) else None
        what = f"column {int(bad[0])}" if names is None else f"column {names[bad[0]]!r}"
        raise ValueError(
            f"Expected finite values; got NaN or infinity in {what}. missing='drop' leaves rows with NaN out."
        )


class ShuffledRows:
    """Training rows in random order, epoch after epoch.

    Args:
        seed: of the order.
        read: from the number of a block to its training rows, NumPy arrays with a common leading axis.
        counts: training rows of each block.
        width: bytes of a row.
        mark: arrays that identify these rows.

    Example:
        >>> rows = ShuffledRows(0, lambda block: np.arange(3) + 3 * block, np.array([3, 3]), 8, None)
        >>> sorted(rows.take(6, 6).tolist()), rows.take(4, 2).shape
        ([0, 1, 2, 3, 4, 5], (2,))
    """

    def __init__(
        self, seed: int, read: Callable[[int], PyTree], counts: Int[np.ndarray, " blocks"], width: int, mark: PyTree
    ):
        self.seed, self.read, self.mark, self.width = seed, read, mark, width
        self.blocks, self.counts = np.flatnonzero(counts), counts
        self.count = int(counts.sum())
        self._window: tuple = None, None

    def part(self, rank: int, processes: int) -> "ShuffledRows":
        """The rows of one of several processes: every so many blocks."""
        mine = np.where(np.isin(np.arange(len(self.counts)), self.blocks[rank::processes]), self.counts, 0)
        if len(self.blocks) < processes:
            raise ValueError(
                f"Expected at least a block of rows for each of {processes} processes; got {len(self.blocks)}."
            )
        return ShuffledRows(self.seed + rank, self.read, mine, self.width, self.mark)

    def take(self, first: int, size: int) -> PyTree:
        """The rows from number `first` on."""
        parts = []
        while size:
            epoch, offset = divmod(first, self.count)
            start, blocks = self._place(epoch, offset)
            rows, order = self._rows(epoch, start, blocks)
            chosen = order[offset - start : offset - start + size]
            parts.append(picked(rows, chosen))
            first, size = first + len(chosen), size - len(chosen)
        return parts[0] if len(parts) == 1 else joined(parts)

    def _place(self, epoch, offset) -> tuple[int, tuple[int, ...]]:
        """The first row and the blocks of the window that contains a row of an epoch."""
        order = np.random.default_rng([self.seed, epoch]).permutation(self.blocks)
        start, size, blocks = 0, 0, []
        for block in order:
            count = int(self.counts[block])
            if blocks and (size + count) * self.width > WINDOW:
                if offset < start + size:
                    break
                start, size, blocks = start + size, 0, []
            size, blocks = size + count, [*blocks, int(block)]
        return start, tuple(blocks)

    def _rows(self, epoch, start, blocks) -> tuple[PyTree, Int[np.ndarray, " n"]]:
        """The rows of a window and their order; those of the last window are kept."""
        if self._window[0] != (epoch, start):
            self._window = None, None  # not two of them in memory
            rows = joined([self.read(block) for block in blocks])
            count = int(self.counts[list(blocks)].sum())
            order = np.random.default_rng([self.seed, epoch, start]).permutation(count)
            self._window = (epoch, start), (rows, order)
        return self._window[1]


def training_stream(
    seed: int,
    table: DiskTable,
    found: Survey,
    held_out: Int[np.ndarray, " m"],
    read: Callable[[Any, Any], tuple],
    *,
    missing: str,
    width: int,
) -> ShuffledRows:
    """All rows of a table but those held out.

    Args:
        seed: of the order.
        table, found: the table and the survey of it.
        held_out: which rows of the sample are held out.
        read: from rows and conditions to what is trained with, NumPy arrays.
        missing: as in the survey.
        width: bytes of a row in training.
    """
    places = found.places[held_out]

    def load_block(block):
        rows = load(table, block, missing)
        trained = np.ones(int(found.counts[block]), bool)
        trained[places[places[:, 0] == block, 1]] = False
        return read(*picked(rows, trained))

    counts = found.counts - np.bincount(places[:, 0], minlength=len(found.counts))
    return ShuffledRows(seed, load_block, counts, width, (found.counts, found.extremes))
