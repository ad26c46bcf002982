"""Options that several commands share: output files, seeds, and text that names columns, supports or conditions."""

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax.random as jr
import numpy as np
from jaxtyping import PRNGKeyArray
from tyro.conf import arg

from ddnf.density import Density
from ddnf.density.columns import Spec
from ddnf.density.frames import read_columns
from ddnf.density.lines import Format
from ddnf.density.schema import Field
from ddnf.density.tables import Table
from ddnf.storage.models import load
from ddnf.system.files import check_overwrite

Output = Annotated[Path, arg(aliases=["-o"])]
OptionalOutput = Annotated[Path | None, arg(aliases=["-o"])]


def check_output(path: Path, *, force: bool, kind: str = "", is_ours: Callable[[Path], bool] = lambda _: False) -> None:
    """Checks that an output can be written, before any work is done, and that no other file would be overwritten.

    Args:
        path: the file to write.
        force: whether any file may be overwritten.
        kind: what may be overwritten without `force`, such as "a ddnf model".
        is_ours: whether an existing file is of that kind.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"Expected a file in an existing folder to write to; got {str(path)!r}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"Expected a file that may be written; got {str(path)!r}.")
    if not force:
        check_overwrite(path, kind=kind, is_ours=is_ours, hint="Use --force to overwrite it.")


def key_from_seed(seed: int) -> PRNGKeyArray:
    """A random key; raises for a seed that JAX does not accept."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"Expected a seed from 0 to {2**32 - 1}; got {seed}.")
    return jr.key(seed)


def load_density(path: Path) -> Density:
    """The density in a model file."""
    model = load(path)
    if not isinstance(model, Density):
        raise ValueError(f"Expected a density; got {str(path)!r}, which holds a {type(model).__name__.lower()}.")
    return model


def split_words(text: str) -> list[str]:
    """The words of a comma-separated list; a comma within quotes is part of a word.

    Example:
        >>> split_words('price, "a, b"')
        ['price', 'a, b']
    """
    return [word.strip() for word in next(csv.reader([text], skipinitialspace=True), [])]


def find_column(word: str, table: Table) -> int:
    """The number of a table's column, from its name or number."""
    if table.names is not None and word in table.names:
        return table.names.index(word)
    if word.isdecimal() and int(word) < table.width:
        return int(word)
    known = f"numbers from 0 to {table.width - 1}" if table.names is None else ", ".join(table.names)
    raise ValueError(f"Expected columns of {str(table.path)!r} ({known[:200]}); got {word!r}.")


def split_columns(table: Table, columns: str | None, condition: str | None) -> tuple[list[int], list[int]]:
    """The numbers of the columns to model, and of those to condition on."""
    conditions = [] if condition is None else [find_column(word, table) for word in split_words(condition)]
    if columns is None:
        # A first column without a name is the index that pandas writes.
        is_index = table.names is not None and table.names[0] == "" and table.width > 1
        modelled = [number for number in range(int(is_index), table.width) if number not in conditions]
    else:
        modelled = [find_column(word, table) for word in split_words(columns)]
    if not modelled or len({*modelled, *conditions}) < len(modelled) + len(conditions):
        raise ValueError("Expected at least one column, and none both in --columns and --condition or twice.")
    return modelled, conditions


def parse_support(text: str | None, table: Table, modelled: list[int]) -> Spec | list[Spec] | dict[int, Spec] | None:
    """The `support` of `fit_density` from the text of --support."""
    if text is None:
        return None
    if text.lstrip().startswith(("{", "[")):
        try:
            parts = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"Expected JSON for the support; got {text!r}: {error}.") from error
        if isinstance(parts, list):
            return [_parse_spec(part) for part in parts]
    elif "=" not in text:
        return _parse_spec(text)
    else:
        parts = {name: part for name, _, part in (word.partition("=") for word in split_words(text))}
    supports = {}
    for word, part in parts.items():
        number = find_column(word.strip(), table)
        if number not in modelled:
            raise ValueError(f"Expected the support of columns that are modelled; got {word!r}, which is not.")
        supports[modelled.index(number)] = _parse_spec(part)
    return supports


def parse_condition(text: str, density: Density) -> list[Any]:
    """The values to condition on, in the order of the density, from the text of --condition."""
    words = split_words(text)
    names = [] if density.names is None else [*density.names[density.dim :]]
    if all("=" in word for word in words):
        parts = {name.strip(): number for name, _, number in (word.partition("=") for word in words)}
        if sorted(parts) != sorted(names):
            known = ", ".join(names) or "none has a name"
            raise ValueError(f"Expected a value for each condition ({known}); got {text!r}.")
        words = [parts[name] for name in names]
    fields = () if density.schema is None else density.schema.given
    values = [_parse_value(word, fields[i] if i < len(fields) else Field("")) for i, word in enumerate(words)]
    if None in values:
        raise ValueError(f"Expected finite numbers to condition on; got {text!r}.")
    return values


def _parse_value(word: str, field: Field) -> Any:
    """A value of a condition; None if it is not one."""
    if field.kind == "category":
        return next((level for level in field.levels if str(level).lower() == word.lower()), word)
    if field.kind in ("day", "time"):
        try:
            return np.datetime64(word, "us")
        except ValueError as error:
            raise ValueError(f"Expected a date such as 2020-12-31 for {field.name!r}; got {word!r}.") from error
    number = _number(word)
    if number is None or not np.isfinite(number):
        return None
    return np.timedelta64(round(1e6 * number), "us") if field.kind == "duration" else number


def read_values(
    table: Table, numbers: list[int], *, missing: str = "raise", progress: bool = False
) -> dict[str, np.ndarray]:
    """Columns of a table by name."""
    values = table.read_columns(numbers, missing=missing, progress=progress)
    return {table.name(number): column for number, column in zip(numbers, values, strict=True)}


def as_columns(density: Density, draws: Any) -> np.ndarray | dict[str, np.ndarray]:
    """Draws as an array, or as a dict of columns if the model was fitted to a table of another library."""
    if density.schema is None or density.schema.library == "array":
        return np.asarray(draws)
    return dict(draws) if isinstance(draws, dict) else {name: raw.values for name, raw in read_columns(draws).items()}


def _parse_spec(part: Any) -> Any:
    """A support: a name, low:high, or an interval from JSON. `fit_density` checks it."""
    if isinstance(part, list):
        return tuple(part)
    if isinstance(part, str) and ":" in part:
        low, _, high = part.partition(":")
        return _parse_bound(low), _parse_bound(high)
    return part.strip() if isinstance(part, str) else part


def _number(text: str) -> float | None:
    return Format().number(text)


def _parse_bound(text: str) -> float | None:
    if text.strip() and _number(text) is None:
        raise ValueError(f"Expected numbers as the ends of an interval; got {text!r}.")
    return _number(text)
