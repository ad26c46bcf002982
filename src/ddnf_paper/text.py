"""Tables as text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, its columns padded to equal width.

    Example:
        >>> print(markdown_table(("model", "KL"), [("planar", 0.25), ("NUTS", "")]))
        | model  | KL   |
        | ------ | ---- |
        | planar | 0.25 |
        | NUTS   |      |
    """
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_rows(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> str:
    """A Markdown table of dicts; `columns` gives the header and format of each key, missing values are left empty.

    Example:
        >>> print(format_rows([dict(model="planar", kl=0.25), {}], dict(model=("model", ""), kl=("KL", ".3f"))))
        | model  | KL    |
        | ------ | ----- |
        | planar | 0.250 |
        |        |       |
    """
    shown = [[formatted(row, key, form) for key, (_, form) in columns.items()] for row in rows]
    return markdown_table([header for header, _ in columns.values()], shown)


def formatted(row: Mapping[str, Any], key: str, form: str) -> str:
    """A value of a dict by a format specification; empty if it is missing or None.

    Example:
        >>> formatted(dict(kl=0.25), "kl", ".3f"), formatted({}, "kl", ".3f")
        ('0.250', '')
    """
    return "" if row.get(key) is None else format(row[key], form)
