"""`ddnf score`: the log density of the rows of a table."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from tyro.conf import OmitArgPrefixes, Positional

from ddnf.cli.options import OptionalOutput, check_output, load_density
from ddnf.density import Density
from ddnf.density.lines import Format
from ddnf.density.tables import Table, check_ending, open_table, write_table

_NUMBERED = re.compile(r"column \d+")


def score(
    model: Positional[Path],
    data: Positional[Path],
    /,
    *,
    output: OptionalOutput = None,
    drop_missing: bool = False,
    reading: OmitArgPrefixes[Format] = Format(),  # noqa: B008
    force: bool = False,
) -> None:
    """Computes the log density of each row of a table, and prints the mean.

    Args:
        model: a file written by `ddnf fit`.
        data: a table; columns are matched by name if both the table and the model have names, otherwise by order.
        output: a table to write with the log density of each row: .csv, .tsv, .npy or .parquet.
        drop_missing: drop rows with empty cells, NA, NaN or null; their score in the output is NaN.
        reading: format of the values in the file.
        force: overwrite the output if it exists.
    """
    if output is not None:
        check_ending(output)
        check_output(output, force=force)
    density = load_density(model)
    rows, kept = read_rows(density, data, reading, drop_missing=drop_missing, with_conditions=True)
    scores = _scores(density, rows)
    if output is not None:
        column = np.full((len(kept), 1), np.nan, scores.dtype)
        column[kept, 0] = scores
        write_table(output, column, ("log_prob",), overwrite=force)
    outside = int(np.sum(np.isneginf(scores)))
    note = f" ({outside} outside of the support)" if outside else ""
    print(f"mean log-likelihood of {len(scores)} rows: {np.mean(scores):.6g}{note}")


def _scores(density: Density, rows: Any) -> Float[np.ndarray, " n"]:
    if density.schema is not None:
        return np.asarray(density.log_prob(rows))
    condition = None if density.condition_dim is None else rows[:, density.dim :]
    return np.asarray(density.log_prob(rows[:, : density.dim], condition))


def matching_columns(density: Density, table: Table, *, with_conditions: bool) -> list[int]:
    """The numbers of the table's columns that the density models, then of its conditions."""
    expected = density.dim + (density.condition_dim or 0 if with_conditions else 0)
    names = () if density.names is None else density.names[:expected]
    if table.names is None and names and all(map(_NUMBERED.fullmatch, names)):  # by `Table.name`
        known = [table.name(number) for number in range(table.width)]
    else:
        known = table.names
    if names and known is not None:
        missing = [name for name in names if name not in known]
        if missing:
            raise ValueError(f"Expected a column {missing[0]!r} in {str(table.path)!r}; got {', '.join(known)}.")
        return [known.index(name) for name in names]
    if table.width < expected or (with_conditions and table.width > expected):
        raise ValueError(f"Expected {expected} columns in {str(table.path)!r}; got {table.width}.")
    return list(range(expected))


def read_rows(
    density: Density, data: Path, reading: Format, *, drop_missing: bool, with_conditions: bool = False
) -> tuple[Any, Bool[np.ndarray, " rows"]]:
    """The columns of a table that the density models, and its conditions: an array, or a dict for mixed columns.

    And which rows were not left out.
    """
    if density.condition_dim is not None and not with_conditions:
        raise ValueError(
            f"Expected a table only for a density without conditions; got {str(data)!r} for a conditional density, "
            "whose rows differ in conditions."
        )
    table, missing = open_table(data, reading), "drop" if drop_missing else "raise"
    numbers = matching_columns(density, table, with_conditions=with_conditions)
    fields = () if density.schema is None else (*density.schema.fields, *density.schema.given)[: len(numbers)]
    values, kept = table.read_complete(numbers, missing=missing, fields=fields)
    if density.schema is None or density.names is None:
        return table.as_array(numbers, values), kept
    return dict(zip(density.names, values, strict=False)), kept
