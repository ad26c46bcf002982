"""`ddnf sample`: draws from a model file."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ddnf.cli.options import OptionalOutput, as_columns, check_output, key_from_seed, load_density, parse_condition
from ddnf.density.tables import check_ending, write_table


def sample(
    model: Positional[Path],
    /,
    *,
    output: OptionalOutput = None,
    rows: Annotated[int, arg(aliases=["-n"])] = 1000,
    condition: str | None = None,
    seed: int = 0,
    force: bool = False,
) -> None:
    """Draws rows from a fitted density.

    Args:
        model: a file written by `ddnf fit`.
        output: the table to write: .csv, .tsv, .npy or .parquet; by default CSV on standard output.
        rows: number of rows.
        condition: the values to condition on: 1.5,2 or year=1.5,size=2.
        seed: random seed.
        force: overwrite the output if it exists.
    """
    if output is not None:
        check_ending(output)
        check_output(output, force=force)
    density = load_density(model)
    if output is not None:
        check_ending(output, mixed=density.schema is not None and density.schema.library != "array")
    values = None if condition is None else parse_condition(condition, density)
    draws = density.sample(key_from_seed(seed), rows, condition=values)
    write_table(output, as_columns(density, draws), density.names and density.names[: density.dim], overwrite=force)
