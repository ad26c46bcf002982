"""`ddnf show`: plots pairs of columns of a table and of draws from a density."""

from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

from ddnf.cli.options import (
    OptionalOutput,
    check_output,
    key_from_seed,
    load_density,
    parse_condition,
    split_words,
)
from ddnf.cli.score import read_rows
from ddnf.density.lines import Format
from ddnf.system.files import open_atomic
from ddnf.system.optional import require


def show(
    model: Positional[Path],
    data: Positional[Path | None] = None,
    /,
    *,
    output: OptionalOutput = None,
    columns: str | None = None,
    condition: str | None = None,
    drop_missing: bool = False,
    reading: OmitArgPrefixes[Format] = Format(),  # noqa: B008
    seed: int = 0,
    force: bool = False,
) -> None:
    """Plots pairs of columns: the rows of a table together with draws from a fitted density.

    Args:
        model: a file written by `ddnf fit`.
        data: the table, for a density without conditions; without it, only draws are plotted.
        output: the picture to write, .png, .pdf or .svg; by default the model's path with the suffix .png.
        columns: names or numbers (from 0) of the columns to plot; by default the first six.
        condition: the values to condition on: 1.5,2 or year=1.5,size=2.
        drop_missing: drop rows with empty cells, NA, NaN or null.
        reading: format of the values in the file.
        seed: random seed.
        force: overwrite the output if it exists.
    """
    require("matplotlib", "plot")
    output = model.with_suffix(".png") if output is None else output
    if output.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"Expected a file that ends in .png, .pdf or .svg; got {str(output)!r}.")
    check_output(output, force=force)
    density = load_density(model)
    rows = None if data is None else read_rows(density, data, reading, drop_missing=drop_missing)[0]
    chosen = None if columns is None else [_column(word, density) for word in split_words(columns)]
    given = None if condition is None else parse_condition(condition, density)
    figure = density.plot(key_from_seed(seed), rows, columns=chosen, condition=given)
    with open_atomic(output) as file:
        figure.savefig(file, format=output.suffix.lower()[1:], dpi=120)
    print(f"picture         {output}")


def _column(word: str, density) -> str | int:
    return int(word) if word.isdecimal() and word not in (density.names or ()) else word
