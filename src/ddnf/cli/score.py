"""`ddnf score`: the log density of the rows of a table."""

from pathlib import Path

import numpy as np
from tyro.conf import Positional

from ddnf.cli.options import OptionalOutput, check_output, load_density
from ddnf.density import Density
from ddnf.density.tables import Table, check_ending, open_table, write_table


def score(
    model: Positional[Path], data: Positional[Path], /, *, output: OptionalOutput = None, force: bool = False
) -> None:
    """Computes the log density of the rows of a table, and prints their mean.

    Args:
        model: a file written by `ddnf fit`.
        data: a table; columns are matched by name if both the table and the model have names, otherwise by order.
        output: the table to write with the log density of each row: .csv, .tsv, .npy or .parquet.
        force: overwrite the output if it exists.
    """
    if output is not None:
        check_ending(output)
        check_output(output, force=force)
    density = load_density(model)
    table = open_table(data)
    values = table.read(_matching_columns(density, table))
    condition = None if density.condition_dim is None else values[:, density.dim :]
    scores = np.asarray(density.log_prob(values[:, : density.dim], condition))
    if output is not None:
        write_table(output, scores[:, None], ("log_prob",), overwrite=force)
    outside = int(np.sum(np.isneginf(scores)))
    note = f" ({outside} outside of the support)" if outside else ""
    print(f"mean log-likelihood of {len(scores)} rows: {np.mean(scores):.6g}{note}")


def _matching_columns(density: Density, table: Table) -> list[int]:
    """The numbers of the table's columns that the density models, then of its conditions."""
    if density.names is not None and table.names is not None:
        missing = [name for name in density.names if name not in table.names]
        if missing:
            raise ValueError(f"Expected a column {missing[0]!r} in {str(table.path)!r}; got {', '.join(table.names)}.")
        return [table.names.index(name) for name in density.names]
    expected = density.dim + (density.condition_dim or 0)
    if table.width != expected:
        raise ValueError(f"Expected {expected} columns in {str(table.path)!r}; got {table.width}.")
    return list(range(expected))
