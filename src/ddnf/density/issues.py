"""Faults of a table that make its density meaningless or unstable: ties, dependent columns, extreme values."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from ddnf.density.columns import Column, to_real

LARGEST_CHECKED = 100_000  # rows; a larger table is checked on so many of them
TIED_SHARE = 0.05
REPEATED_SHARE = 0.01
COLLINEAR = 1e-6  # deviation left of a column after regression on others, relative to its own
OUTLIER = 100  # interquartile ranges from the median


def find_issues(
    rows: Float[np.ndarray, "n dim"], columns: Sequence[Column], names: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Problems with the rows of a table, one line per problem with a remedy.

    Example:
        >>> from ddnf.density.columns import columns_from
        >>> rng = np.random.default_rng(0)
        >>> rows = np.stack([rng.normal(size=100), rng.poisson(3.0, 100)], axis=1)
        >>> find_issues(rows, columns_from({1: "count"}, 2))
        ()
        >>> find_issues(rows, columns_from(None, 2))[0][:53]
        'Column 1 has 10 distinct values in 100 rows, all inte'
    """
    labels = [f"column {i}" if names is None else f"column {names[i]!r}" for i in range(len(columns))]
    keys: list[str | int] = list(range(len(columns)) if names is None else names)
    some = rows[:: -(-len(rows) // LARGEST_CHECKED)]
    distinct = np.unique(some, axis=0) if len(columns) > 1 else some
    ties = [_ties(distinct[:, i], labels[i], keys[i]) for i, column in enumerate(columns) if not column.integer]
    repeated = 1 - len(distinct) / len(some)
    if repeated > REPEATED_SHARE and not any(ties) and not all(column.integer for column in columns):
        ties.append(
            f"{repeated:.0%} of the rows are duplicates: the likelihood of a density has no upper bound there. Drop "
            "the duplicates, or add noise of the size of the rounding."
        )
    real = to_real(columns, some + 0.5 * np.array([column.integer for column in columns]))[0]
    outliers = [
        _outliers(real[:, i], some[:, i], labels[i], column) for i, column in enumerate(columns) if not column.integer
    ]
    found = filter(None, [*ties, *_dependent(real, columns, labels), *outliers])
    return tuple(text[0].upper() + text[1:] for text in found)


def _ties(values: Float[np.ndarray, " n"], label: str, key: str | int) -> str | None:
    distinct, counts = np.unique(values, return_counts=True)
    share, top = 1 - len(distinct) / len(values), int(np.argmax(counts))
    if share < TIED_SHARE or len(distinct) < 2:
        return None
    if (distinct == np.floor(distinct)).all():
        support = "count" if distinct[0] >= 0 else "integer"
        return (
            f"{label} has {len(distinct)} distinct values in {len(values)} rows, all integers: as a real column its "
            f"likelihood has no upper bound and its draws are not integers. Use support={{{key!r}: {support!r}}}."
        )
    if counts[top] > 0.2 * len(values):
        return (
            f"{label} has the value {distinct[top]:.6g} in {counts[top] / len(values):.0%} of the rows: the likelihood "
            "of a density has no upper bound there. Fit only the other rows, or use the column as a condition."
        )
    gap = float(np.min(np.diff(distinct)))
    return (
        f"{label} has ties in {share:.0%} of the rows: the likelihood of a density has no upper bound there. Add "
        f"uniform noise of the size of the rounding (the smallest gap is {gap:.3g})."
    )


def _dependent(real: Float[np.ndarray, "n dim"], columns: Sequence[Column], labels: Sequence[str]) -> list[str]:
    """Real columns that are linear functions of those before them, by the diagonal of R in a QR decomposition."""
    chosen = [i for i, column in enumerate(columns) if not column.integer]
    if len(real) <= len(chosen) + 1:
        return []
    centred = real[:, chosen] - np.median(real[:, chosen], axis=0)
    centred = centred - centred.mean(axis=0)
    standard = centred / np.maximum(np.linalg.norm(centred, axis=0), np.finfo(float).tiny)
    left = np.abs(np.diag(np.linalg.qr(standard, mode="r")))
    return [_dependence(standard, place, chosen, labels) for place in np.flatnonzero(left < COLLINEAR)]


def _dependence(standard, place, chosen, labels) -> str:
    weights = np.linalg.lstsq(standard[:, :place], standard[:, place], rcond=1e-9)[0]
    used = [labels[chosen[i]] for i in np.flatnonzero(np.abs(weights) > 1e-3)]
    shown = ", ".join(used[:4]) + (" and others" if len(used) > 4 else "")
    return (
        f"{labels[chosen[place]]} is an exact linear function of {shown}: the likelihood of a density has no upper "
        "bound there. Drop the column."
    )


def _outliers(real, values, label: str, column: Column) -> str | None:
    low, median, high = np.quantile(real, [0.25, 0.5, 0.75])
    distance = np.abs(real - median)
    far = int(np.sum(distance > OUTLIER * (high - low)))
    if high == low or not far:
        return None
    worst = int(np.argmax(distance))
    use_log = column == Column() and (values > 0).all()
    return (
        f"{label} has {far} values more than {OUTLIER} interquartile ranges from the median; the farthest is "
        f"{values[worst]:.6g}. They can dominate the fit. Clip or drop them"
        + (", or use support='positive' for this column." if use_log else ".")
    )
