"""The log of a fit: one row per stage."""

import math
from typing import NamedTuple

_HEAD = ("stage", "seconds", "gradients", "ELBO", "k-hat", "ESS", "decision")


class Row(NamedTuple):
    """One stage: its time, gradient evaluations, the diagnosis of its result (NaN where none), and what comes next."""

    stage: str
    seconds: float
    gradients: int
    elbo: float = math.nan
    khat: float = math.nan
    ess: float = math.nan
    decision: str = ""


class Log(tuple[Row, ...]):
    """The stages of a fit in order; prints as a table.

    Example:
        >>> print(Log([Row("modes", 0.25, 120, decision="base"), Row("base", 0.5, 0, -1.25, 0.5, 0.9, "flow 1")]))
        stage  seconds  gradients   ELBO  k-hat    ESS  decision
        modes      0.2        120      -      -      -  base
        base       0.5          0  -1.25   0.50  0.900  flow 1
    """

    __slots__ = ()

    def __str__(self):
        cells = [_HEAD, *(_cells(row) for row in self)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(_HEAD))]
        return "\n".join(_line(row, widths) for row in cells)

    @property
    def gradients(self) -> int:
        """Gradient evaluations of all stages."""
        return sum(row.gradients for row in self)


def _cells(row: Row) -> tuple[str, ...]:
    numbers = (f"{row.elbo:.5g}", f"{row.khat:.2f}", f"{row.ess:.3f}")
    shown = ("-" if number == "nan" else number for number in numbers)
    return (row.stage, f"{row.seconds:.1f}", str(row.gradients), *shown, row.decision)


def _line(cells, widths) -> str:
    first, *middle, last = (
        cell.ljust(width) if column in (0, len(cells) - 1) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *middle, last]).rstrip()
