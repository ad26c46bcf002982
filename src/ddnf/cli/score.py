"""`ddnf score`: the log density of the rows of a table."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from tyro.conf import OmitArgPrefixes, Positional

from ddnf.cli.options import OptionalOutput, check_output, load_density
from ddnf.density import Density
from ddnf.density.lines import Format
from ddnf.density.tables import Table, check_ending, open_table, write_table


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
        drop_missing: drop rows with empty cells, NA, NaN or null.
        reading: format of the values in the file.
        force: overwrite the output if it exists.
    """
    if output is not None:
        check_ending(output)
        check_output(output, force=force)
    density = load_density(model)
    table = open_table(data, reading)
    scores = _scores(density, table, "drop" if drop_missing else "raise")
    if output is not None:
        write_table(output, scores[:, None], ("log_prob",), overwrite=force)
    outside = int(np.sum(np.isneginf(scores)))
    note = f" ({outside} outside of the support)" if outside else ""
    print(f"mean log-likelihood of {len(scores)} rows: {np.mean(scores):.6g}{note}")


def _scores(density: Density, table: Table, missing: str) -> Float[np.ndarray, " n"]:
    numbers = matching_columns(density, table)
    if density.schema is not None and density.names is not None:
        columns = table.read_columns(numbers, missing=missing)
        return np.asarray(density.log_prob(dict(zip(density.names, columns, strict=True))))
    values = table.read(numbers, missing=missing)
    condition = None if density.condition_dim is None else values[:, density.dim :]
    return np.asarray(density.log_prob(values[:, : density.dim], condition))


def matching_columns(density: Density, table: Table, *, with_conditions: bool = True) -> list[int]:
    """The numbers of the table's columns that the density models, then of its conditions."""
    expected = density.dim + (density.condition_dim or 0 if with_conditions else 0)
    if density.names is not None and table.names is not None:
        names = density.names[:expected]
        missing = [name for name in names if name not in table.names]
        if missing:
            raise ValueError(f"Expected a column {missing[0]!r} in {str(table.path)!r}; got {', '.join(table.names)}.")
        return [table.names.index(name) for name in names]
    if table.width < expected or (with_conditions and table.width > expected):
        raise ValueError(f"Expected {expected} columns in {str(table.path)!r}; got {table.width}.")
    return list(range(expected))


def read_rows(density: Density, path: Path, reading: Format, *, drop_missing: bool) -> Any:
    """The rows of a file in the form that the density takes, without conditions."""
    table = open_table(path, reading)
    numbers = matching_columns(density, table, with_conditions=False)
    values = table.read_columns(numbers, missing="drop" if drop_missing else "raise")
    names = density.names or [str(i) for i in range(density.dim)]
    return dict(zip(names, values, strict=False)) if density.schema is not None else [*zip(*values, strict=True)]
