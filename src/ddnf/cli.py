"""The `ddnf` command: fits densities to tables in files, draws from them, and scores rows.

A subcommand is a function with `@app.command`: its arguments are the options, its docstring the help.
"""

import csv
import dataclasses
import json
import os
import re
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import jax.random as jr
import numpy as np
import tyro
from jaxtyping import Float, PRNGKeyArray, Shaped
from tyro.conf import Positional, arg

from ddnf.inference.columns import Spec
from ddnf.inference.density import Density, fit_density
from ddnf.inference.models import load
from ddnf.optional import require

app = tyro.extras.SubcommandApp()


@app.command
def fit(
    data: Positional[Path],
    /,
    *,
    output: Annotated[Path, arg(aliases=["-o"])],
    columns: str | None = None,
    condition: str | None = None,
    support: str | None = None,
    steps: int = 5000,
    batch: int = 256,
    learning_rate: float = 5e-3,
    validation: float = 0.1,
    patience: int = 10,
    seed: int = 0,
    checkpoint: Path | None = None,
    quiet: bool = False,
) -> None:
    """Fits a density to the rows of a table, and writes it to a file.

    Args:
        data: a table: .csv or .tsv (with or without a header), .npy or .parquet.
        output: where to write the model.
        columns: names or numbers (from 0) of columns to take, such as price,age; all but the conditions if left out.
        condition: names or numbers of columns to condition the density on.
        support: where columns live, such as price=positive,age=count,share=0:1; or one for all, such as positive; or
            JSON, such as '{"price": "positive", "share": [0, 1]}'. Known are real, positive, unit, integer, count.
        steps: most training steps.
        batch: rows for each step.
        learning_rate: of Adam, at its height.
        validation: share of the rows to hold out, or their number.
        patience: stop after so many looks at the held-out rows without a better value.
        seed: of the random numbers.
        checkpoint: folder to resume from, should the run be interrupted.
        quiet: show no bar and no summary.
    """
    start = time.perf_counter()
    _check_output(output)
    key = _key(seed)
    table = open_table(data)
    chosen, given = _split(table, columns, condition)
    labels = [table.label(number) for number in chosen]
    supports = _supports(support, table, chosen)
    values = table.read([*chosen, *given])
    try:
        density = fit_density(
            key,
            values[:, : len(chosen)],
            values[:, len(chosen) :] if given else None,
            support=supports,
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            validation=int(validation) if validation >= 1 and validation.is_integer() else validation,
            patience=patience,
            checkpoint=checkpoint,
            progress=not quiet,
        )
    except ValueError as error:
        # The library counts the columns of its array; users know those of their file.
        raise ValueError(
            re.sub(r"\bcolumn (\d+)", lambda match: f"column {labels[int(match[1])]!r}", str(error))
        ) from error
    if table.names is not None:
        density = dataclasses.replace(density, names=tuple(table.names[number] for number in [*chosen, *given]))
    density.save(output)
    if not quiet:
        print(f"rows            {len(values)}")
        print(f"columns         {', '.join(map(str, labels))}")
        if given:
            print(f"given           {', '.join(str(table.label(number)) for number in given)}")
        print(f"log-likelihood  {density.log_likelihood:.6g} held out, {density.train_log_likelihood:.6g} in training")
        print(f"time            {time.perf_counter() - start:.1f} s")
        print(f"model           {output}")


@app.command
def sample(
    model: Positional[Path],
    /,
    *,
    output: Annotated[Path | None, arg(aliases=["-o"])] = None,
    rows: Annotated[int, arg(aliases=["-n"])] = 1000,
    condition: str | None = None,
    seed: int = 0,
) -> None:
    """Draws rows from a fitted density.

    Args:
        model: a file that `ddnf fit` has written.
        output: where to write the draws: .csv, .tsv, .npy or .parquet; CSV to the standard output if left out.
        rows: how many.
        condition: what to condition on, a number for each condition: 1.5,2 or year=1.5,size=2.
        seed: of the random numbers.
    """
    _check_output(output, _WRITERS)
    density = _density(model)
    given = None if condition is None else _conditions(condition, density)
    draws = density.sample(_key(seed), rows, condition=given)
    write_table(output, np.asarray(draws), density.names and density.names[: density.dim])


@app.command
def score(
    model: Positional[Path], data: Positional[Path], /, *, output: Annotated[Path | None, arg(aliases=["-o"])] = None
) -> None:
    """Computes the log density of the rows of a table, and prints their mean.

    Args:
        model: a file that `ddnf fit` has written.
        data: a table; where it and the model have names, columns are found by name, otherwise by order.
        output: where to write the log density of each row: .csv, .tsv, .npy or .parquet.
    """
    _check_output(output, _WRITERS)
    density = _density(model)
    table = open_table(data)
    values = table.read(_places(density, table))
    given = None if density.condition_dim is None else values[:, density.dim :]
    scores = np.asarray(density.log_prob(values[:, : density.dim], given))
    if output is not None:
        write_table(output, scores[:, None], ("log_prob",))
    outside = int(np.sum(np.isneginf(scores)))
    note = f" ({outside} outside of the support)" if outside else ""
    print(f"mean log-likelihood of {len(scores)} rows: {np.mean(scores):.6g}{note}")


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command. What is wrong with the input is one line on the standard error, and exit code 2.

    Args:
        args: the words after `ddnf`; those of the process if None.
    """
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
        try:
            app.cli(prog="ddnf", description=_DESCRIPTION, args=args, config=_CONFIG)
        except BrokenPipeError:
            # Whoever read our output has seen enough. Python would complain when it closes the stream.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            _say(f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error))
            sys.exit(2)
        except (ValueError, ImportError) as error:
            _say(str(error))
            sys.exit(2)
        except KeyboardInterrupt:
            _say("interrupted")
            sys.exit(130)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table in a file, of which nothing but the names is read yet.

    Attributes:
        path: where.
        names: of its columns; None where the file has none.
        width: number of columns.
        load: from the numbers of some columns to their values.
    """

    path: Path
    names: tuple[str, ...] | None
    width: int
    load: Callable[[list[int]], np.ndarray]

    def label(self, number: int) -> str | int:
        return number if self.names is None else self.names[number]

    def read(self, numbers: list[int]) -> Float[np.ndarray, "rows columns"]:
        """Some columns, in that order; each number has to be finite."""
        values = self.load(numbers)
        if not len(values):
            raise ValueError(f"Expected rows of numbers in {str(self.path)!r}; got none.")
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            raise self.fault("a missing value, NaN or infinity", int(bad[0][0]) + 1, numbers[int(bad[0][1])])
        return values

    def fault(self, what: str, row: int, number: int) -> ValueError:
        place = f"row {row}, column {self.label(number)!r} of {str(self.path)!r}"
        return ValueError(f"Expected numbers; got {what} in {place}.")


def open_table(path: Path) -> Table:
    """Opens a table in a file that ends in .csv, .tsv, .npy or .parquet. Rows are counted from 1, without a header.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.csv")
        >>> _ = path.write_text("id,x,y\\nfirst,1,2\\nsecond,3,4\\n")
        >>> table = open_table(path)
        >>> table.names, table.read([2, 1]).tolist()
        (('id', 'x', 'y'), [[2.0, 1.0], [4.0, 3.0]])
    """
    opener = _by_ending(path, _READERS)
    if not path.is_file():
        what = "not a file" if path.exists() else "not there"
        raise ValueError(f"Expected a table; got {str(path)!r}, which is {what}.")
    return opener(path)


def write_table(path: Path | None, values: Shaped[np.ndarray, "rows columns"], names: Sequence[str] | None) -> None:
    """Writes a table in the format of the file's ending; CSV to the standard output if `path` is None."""
    if path is None:
        _write_lines(sys.stdout, values, names, ",")
    else:
        _by_ending(path, _WRITERS)(path, values, names)


def _open_lines(path: Path) -> Table:
    first = next(_lines(path), None)
    if first is None:
        raise ValueError(f"Expected a table in {str(path)!r}; got an empty file.")
    is_header = any(cell.strip() and _as_number(cell) is None for cell in first)
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
                value = _as_number(cells[number])
                if value is None:
                    raise table.fault(repr(cells[number][:40]), row, number)
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


def _as_number(cell: str) -> float | None:
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
        raise ValueError(f"Expected an array of numbers in {str(path)!r}; got something else or a part.") from error
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
                raise table.fault(f"{file.schema_arrow.types[number]}", 1, number)
            columns.append(column.astype(float))
        return np.stack(columns, axis=1)

    table = Table(path, names, len(names), load)
    return table


def _write_lines(file, values, names, delimiter: str) -> None:
    if names is not None:
        csv.writer(file, delimiter=delimiter, lineterminator="\n").writerow(names)
    # As many digits as it takes to read the same numbers again.
    np.savetxt(file, values, "%.9g" if values.dtype == np.float32 else "%.17g", delimiter)


def _write_csv(path: Path, values, names) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        _write_lines(file, values, names, "\t" if path.suffix.lower() == ".tsv" else ",")


def _write_array(path: Path, values, names) -> None:
    with open(path, "wb") as file:
        np.save(file, values)


def _write_parquet(path: Path, values, names) -> None:
    arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    names = names or [str(number) for number in range(values.shape[1])]
    with open(path, "wb") as file:
        parquet.write_table(arrow.table(dict(zip(names, values.T.copy(), strict=True))), file)


_READERS = {".csv": _open_lines, ".tsv": _open_lines, ".npy": _open_array, ".parquet": _open_parquet}
_WRITERS = {".csv": _write_csv, ".tsv": _write_csv, ".npy": _write_array, ".parquet": _write_parquet}
_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
_DESCRIPTION = "Deep diffeomorphic normalizing flows: densities of tables, exact and invertible."


def _by_ending(path: Path, table: dict[str, Callable]) -> Callable:
    if path.suffix.lower() not in table:
        raise ValueError(f"Expected a file that ends in {', '.join(table)}; got {str(path)!r}.")
    return table[path.suffix.lower()]


def _check_output(path: Path | None, endings: dict[str, Callable] | None = None) -> None:
    """Before any work is done: whether its result can be written."""
    if path is None:
        return
    if endings is not None:
        _by_ending(path, endings)
        if path.suffix.lower() == ".parquet":
            require("pyarrow", "parquet")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"Expected a file in an existing folder to write to; got {str(path)!r}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"Expected a file that may be written; got {str(path)!r}.")


def _density(path: Path) -> Density:
    model = load(path)
    if not isinstance(model, Density):
        raise ValueError(f"Expected a density; got {str(path)!r}, which holds a {type(model).__name__.lower()}.")
    return model


def _key(seed: int) -> PRNGKeyArray:
    if not 0 <= seed < 2**32:
        raise ValueError(f"Expected a seed from 0 to {2**32 - 1}; got {seed}.")
    return jr.key(seed)


def _words(text: str) -> list[str]:
    """Words between commas; a comma within quotes is part of a word."""
    return [word.strip() for word in next(csv.reader([text], skipinitialspace=True), [])]


def _number(word: str, table: Table) -> int:
    """The number of a column, by its name or number."""
    if table.names is not None and word in table.names:
        return table.names.index(word)
    if word.isdecimal() and int(word) < table.width:
        return int(word)
    known = f"numbers from 0 to {table.width - 1}" if table.names is None else ", ".join(table.names)
    raise ValueError(f"Expected columns of {str(table.path)!r} ({known[:200]}); got {word!r}.")


def _split(table: Table, columns: str | None, condition: str | None) -> tuple[list[int], list[int]]:
    """The numbers of the columns to model, and of those to condition on."""
    given = [] if condition is None else [_number(word, table) for word in _words(condition)]
    if columns is None:
        chosen = [number for number in range(table.width) if number not in given]
    else:
        chosen = [_number(word, table) for word in _words(columns)]
    if not chosen or len({*chosen, *given}) < len(chosen) + len(given):
        raise ValueError("Expected at least one column, and none both in --columns and --condition or twice.")
    return chosen, given


def _supports(text: str | None, table: Table, chosen: list[int]) -> Spec | list[Spec] | dict[int, Spec] | None:
    """What `fit_density` takes for support, from what a user has written."""
    if text is None:
        return None
    if text.lstrip().startswith(("{", "[")):
        try:
            parts = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"Expected JSON for the support; got {text!r}: {error}.") from error
        if isinstance(parts, list):
            return [_spec(part) for part in parts]
    elif "=" not in text:
        return _spec(text)
    else:
        parts = {name: part for name, _, part in (word.partition("=") for word in _words(text))}
    places = {}
    for word, part in parts.items():
        number = _number(word.strip(), table)
        if number not in chosen:
            raise ValueError(f"Expected the support of columns that are modelled; got {word!r}, which is not.")
        places[chosen.index(number)] = _spec(part)
    return places


def _spec(part: Any) -> Any:
    """A support: a name, low:high, or what JSON has for an interval. `fit_density` speaks up if it is none."""
    if isinstance(part, list):
        return tuple(part)
    if isinstance(part, str) and ":" in part:
        low, _, high = part.partition(":")
        return _end(low), _end(high)
    return part.strip() if isinstance(part, str) else part


def _end(text: str) -> float | None:
    if text.strip() and _as_number(text) is None:
        raise ValueError(f"Expected numbers as the ends of an interval; got {text!r}.")
    return _as_number(text)


def _places(density: Density, table: Table) -> list[int]:
    """The numbers of a table's columns that a density is of, and then of those it is conditioned on."""
    if density.names is not None and table.names is not None:
        missing = [name for name in density.names if name not in table.names]
        if missing:
            raise ValueError(f"Expected a column {missing[0]!r} in {str(table.path)!r}; got {', '.join(table.names)}.")
        return [table.names.index(name) for name in density.names]
    wanted = density.dim + (density.condition_dim or 0)
    if table.width != wanted:
        raise ValueError(f"Expected {wanted} columns in {str(table.path)!r}; got {table.width}.")
    return list(range(wanted))


def _conditions(text: str, density: Density) -> list[float]:
    """The numbers to condition on, in the order of the density."""
    words = _words(text)
    names = [] if density.names is None else [*density.names[density.dim :]]
    if all("=" in word for word in words):
        parts = {name.strip(): number for name, _, number in (word.partition("=") for word in words)}
        if sorted(parts) != sorted(names):
            known = ", ".join(names) or "none has a name"
            raise ValueError(f"Expected a value for each condition ({known}); got {text!r}.")
        words = [parts[name] for name in names]
    numbers = [_as_number(word) for word in words]
    if not all(number is not None and np.isfinite(number) for number in numbers):
        raise ValueError(f"Expected finite numbers to condition on; got {text!r}.")
    return [number for number in numbers if number is not None]


def _say(text: str) -> None:
    """One line on the standard error, whatever was in the text."""
    print(f"ddnf: {' '.join(text.split())}", file=sys.stderr)
