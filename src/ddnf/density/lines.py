"""Tables in text and Excel files: the cells of each line, and columns of numbers, text, booleans or dates from them."""

import contextlib
import csv
import dataclasses
import gzip
import io
import re
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, dropwhile
from pathlib import Path
from typing import Any

import numpy as np

from ddnf.density.schema import Field
from ddnf.system.optional import require

MISSING = frozenset(["", "na", "n/a", "nan", "null", "none", "nil", "?", "-", "#n/a", ".", "missing"])
_LINES_PER_MOVE = 10_000
DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?)?Z?")
# Numbers and dates in other notations, and what to do about them.
_FOREIGN = {
    re.compile(r"[-+]?(\d{1,3}([.' ]\d{3})+|\d+),\d+|[-+]?\d+"): "Use --decimal , for decimal commas.",
    re.compile(r"[-+]?\d{1,3}([,' ]\d{3})*(\.\d+)?"): "Use --thousands with the mark between thousands.",
    re.compile(r"[-+]?\d+([.,]\d+)?\s*%"): "Write percentages without the sign.",
    re.compile(r"[$€£¥]\s*[-+]?\d[\d.,' ]*"): "Write amounts without the sign of the currency.",
    re.compile(r"\d{1,2}[./]\d{1,2}[./]\d{2,4}"): "Write dates as 2020-12-31.",
}


@dataclasses.dataclass(frozen=True)
class Format:
    """The format of the values in a file.

    Attributes:
        decimal: decimal mark of numbers: "." or ",".
        thousands: separator of groups of three digits, such as "," or "'".
        comment: skip lines that start with this, such as "#".
        encoding: of a text file, such as latin-1; by default UTF-8.
        sheet: name of the sheet of an Excel file; by default the first.
    """

    decimal: str = "."
    thousands: str = ""
    comment: str = ""
    encoding: str = "utf-8-sig"
    sheet: str | None = None

    def check(self) -> None:
        """Raises unless the marks are marks that differ."""
        for name, mark in (("decimal", self.decimal), ("thousands", self.thousands or "'")):
            if len(mark) != 1 or mark.isalnum() or mark in "+-_":
                raise ValueError(f"Expected one mark for {name}, such as a comma; got {mark!r}.")
        if self.thousands == self.decimal:
            raise ValueError(f"Expected another mark for thousands than for decimals; got {self.decimal!r} for both.")

    def number(self, cell: str) -> float | None:
        """The number in a cell, or None.

        Example:
            >>> Format().number("1e3"), Format().number("many"), Format(decimal=",", thousands=".").number("1.234,5")
            (1000.0, None, 1234.5)
        """
        cell = cell.strip()
        if "_" in cell:  # Python would take it for a number
            return None
        if self.thousands and self.thousands in cell:
            mark = re.escape(self.thousands)
            grouped = re.match(rf"[-+]?\d{{1,3}}({mark}\d{{3}})+(?!\d)", cell)
            if grouped is None or self.thousands in cell[grouped.end() :]:
                return None
            cell = cell.replace(self.thousands, "")
        if self.decimal != ".":
            cell = cell.replace(".", "x").replace(self.decimal, ".")
        try:
            return float(cell)
        except ValueError:
            return None


def text_lines(path: Path, form: Format, moved: Callable[[int], Any] | None = None) -> Iterator[list[str]]:
    """The cells of each line of a text file that is not blank.

    Args:
        path: the file.
        form: how it writes its values.
        moved: called periodically with the number of bytes read so far.
    """
    try:
        with open(path, "rb") as raw:
            binary: Any = gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw
            file = io.TextIOWrapper(binary, newline="", encoding=form.encoding)
            lines = (line for line in file if not (form.comment and line.startswith(form.comment)))
            lines = dropwhile(lambda line: not line.strip(), lines)
            start = next(lines, "")
            said = re.fullmatch(r"sep=(.)\s*", start)  # by Excel
            lines, delimiter = (lines, said[1]) if said else (chain([start], lines), _delimiter(start, form))
            for number, cells in enumerate(csv.reader(lines, delimiter=delimiter, strict=True)):
                if moved is not None and number % _LINES_PER_MOVE == 0:
                    moved(raw.tell())
                if cells:
                    yield cells
    except csv.Error as error:
        raise ValueError(
            f"Expected two quotes around a cell, or none, in {str(path)!r}; got one that ends no cell: {error}."
        ) from error
    except (UnicodeDecodeError, LookupError) as error:
        raise ValueError(
            f"Expected text in {'UTF-8' if form.encoding == 'utf-8-sig' else form.encoding} in {str(path)!r}; got "
            f"something else: {error}. Choose another encoding, such as --encoding latin-1."
        ) from error
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"Expected a complete gz file in {str(path)!r}; got {error}.") from error


def _delimiter(line: str, form: Format) -> str:
    """The mark that splits a line into most cells; before that, one that splits it into numbers with decimal commas.

    Example:
        >>> _delimiter("a,b|c,d", Format()), _delimiter("1,5;2,5;3,5", Format())
        (',', ';')
    """
    cells = {mark: next(csv.reader([line], delimiter=mark), []) for mark in ",\t;|" if mark != form.decimal}
    with_commas = dataclasses.replace(form, decimal=",", thousands=form.thousands.replace(",", ""))
    for mark in "\t;|":
        if len(cells[mark]) > 1 and all(with_commas.number(cell) is not None for cell in cells[mark]):
            return mark
    return max(cells, key=lambda mark: len(cells[mark]))


def sheet_lines(path: Path, form: Format, moved: Callable[[int], Any] | None = None) -> Iterator[list[str]]:
    """The cells of each row of an Excel sheet that is not blank, as text; `moved` is not called."""
    openpyxl = require("openpyxl", "excel")
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
    except Exception as error:  # damaged files raise errors of several libraries
        raise ValueError(f"Expected an Excel file in {str(path)!r}; got something else: {error}.") from error
    if form.sheet is not None and form.sheet not in book.sheetnames:
        book.close()
        raise ValueError(f"Expected a sheet of {str(path)!r} ({', '.join(book.sheetnames)}); got {form.sheet!r}.")
    with contextlib.closing(book):
        for row in book[form.sheet or book.sheetnames[0]].iter_rows(values_only=True):
            if any(cell is not None for cell in row):
                yield [_cell_text(cell, form) for cell in row]


def _cell_text(cell, form: Format) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float | int) and not isinstance(cell, bool):
        return repr(cell).replace(".", form.decimal)
    return str(cell).removesuffix(" 00:00:00") if hasattr(cell, "isoformat") else str(cell)


def _advice(cells: Collection[str]) -> str:
    """A remedy if all of these are numbers or dates in another notation; otherwise an empty string.

    Example:
        >>> _advice(["1,5"]), _advice(["1,500", "1"])[:38], _advice(["red"])
        ('Use --decimal , for decimal commas.', 'Use --decimal , for decimal commas. Us', '')
    """
    return " ".join(hint for form, hint in _FOREIGN.items() if cells and all(map(form.fullmatch, cells)))


class Reader:
    """Collects one column, cell by cell.

    Args:
        form: how the file writes its values.
        field: what the column holds, where that is known. Else the first value decides whether it is numbers or text.
    """

    def __init__(self, form: Format, field: Field | None = None):
        self.form = form
        self.numbers = array("d")
        self.codes, self.levels = array("q"), {}
        self.is_text = None if field is None else {"category": True, "number": False}.get(field.kind)
        # As they are written; those of booleans in any case.
        known = () if field is None else field.levels
        self.known = {str(level): level for level in known}
        self.known |= {str(level).lower(): level for level in known if isinstance(level, bool)}

    def add(self, cell: str) -> bool:
        """Takes a cell; False if it is not a number in a column of numbers."""
        cell = cell.strip()
        value = None if self.is_text else self.form.number(cell)
        if value is None and cell.lower() in MISSING:
            value = np.nan
        if self.is_text is None and (value is None or value == value):
            self.is_text = value is None
        if self.is_text:
            if not self.codes:
                self.codes.extend([-1] * len(self.numbers))
            is_missing = cell.lower() in MISSING and cell not in self.known
            self.codes.append(-1 if is_missing else self.levels.setdefault(cell, len(self.levels)))
            return True
        self.numbers.append(np.nan if value is None else value)
        return value is not None

    def hint(self) -> tuple[str, str] | None:
        """A value and a remedy, if all text in a column is numbers or dates in another notation.

        Example:
            >>> reader = Reader(Format())
            >>> reader.add("1,5"), reader.add("2,25")
            (True, True)
            >>> reader.hint()
            ('1,5', 'Use --decimal , for decimal commas.')
        """
        found = "" if self.known else _advice(self.levels)
        return (next(iter(self.levels)), found) if found else None

    def column(self) -> np.ndarray:
        """Numbers with NaN, or text with None, booleans with None, or dates with NaT, where a value is missing."""
        if not self.is_text:
            return np.asarray(self.numbers)
        levels: list = [*self.levels, None]
        if self.known:
            levels = [*(self.known.get(level, self.known.get(level.lower(), level)) for level in self.levels), None]
        elif {level.lower() for level in self.levels} <= {"true", "false"}:
            levels = [*(level.lower() == "true" for level in self.levels), None]
        elif all(map(DATE.fullmatch, self.levels)):
            dates = [level.removesuffix("Z") for level in self.levels]
            try:
                return np.array([*dates, "NaT"], "datetime64[us]")[np.asarray(self.codes)]
            except ValueError as error:
                raise ValueError(f"Expected dates of the calendar; got one that is not: {error}.") from error
        found = np.empty(len(levels), object)
        found[:] = levels
        return found[np.asarray(self.codes)]


def read_cells(
    lines: Iterator[list[str]],
    width: int,
    numbers: Sequence[int],
    form: Format,
    fail: Callable[[str, int, int, str], Exception],
    fields: Sequence[Field] = (),
) -> list[np.ndarray]:
    """Some columns of a table, from its lines without the header; `fail(what, row, number, hint)` makes the error.

    `fields` are what the columns hold, where that is known.
    """
    readers = [Reader(form, field) for field in fields or [None] * len(numbers)]
    for row, cells in enumerate(lines, start=1):
        if len(cells) != width:
            raise fail("", row, len(cells), "")
        for reader, number in zip(readers, numbers, strict=True):
            if not reader.add(cells[number]):
                cell = cells[number].strip()
                raise fail(repr(cell[:40]), row, number, f" {_advice([cell])}".rstrip())
    for reader, number in zip(readers, numbers, strict=True):
        if found := reader.hint():
            raise fail(repr(found[0][:40]), 1, number, " " + found[1])
    return [reader.column() for reader in readers]
