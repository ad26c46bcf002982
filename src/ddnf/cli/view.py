"""`ddnf view`: writes an interactive page that shows a fitted flow over time."""

import os
import sys
import webbrowser
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection, Chain, TriangularAffine
from jaxtyping import Float
from tyro.conf import OmitArgPrefixes, Positional

from ddnf.cli.options import OptionalOutput, check_output, parse_condition, split_words
from ddnf.cli.score import read_rows
from ddnf.density import Density
from ddnf.density.columns import Column, to_real
from ddnf.density.encode import encode_condition, encode_fields
from ddnf.density.lines import Format
from ddnf.posterior import Posterior
from ddnf.storage.models import load
from ddnf.system.files import write_atomic
from ddnf.viz.view import frames, is_page, page


def view(
    model: Positional[Path],
    data: Positional[Path | None] = None,
    /,
    *,
    output: OptionalOutput = None,
    condition: str | None = None,
    columns: str | None = None,
    drop_missing: bool = False,
    reading: OmitArgPrefixes[Format] = Format(),  # noqa: B008
    no_open: bool = False,
    force: bool = False,
) -> None:
    """Writes a page that shows a fitted flow with a time slider, and opens it in the browser.

    Args:
        model: a file with a density or a posterior.
        data: the table that the density was fitted to; the page then opens at time 1 and also shows these rows.
        output: the page to write; by default the model's path with the suffix .html. A page that ddnf wrote is
            replaced.
        condition: the values to condition on: 1.5,2 or year=1.5,size=2.
        columns: names or numbers (from 0) of two or more columns to show; by default the first six.
        drop_missing: drop rows with empty cells, NA, NaN or null.
        reading: format of the values in the file.
        no_open: do not open the page in the browser.
        force: overwrite the output even if it is not a page written by this command.
    """
    output = model.with_suffix(".html") if output is None else output
    if output.exists() and model.exists() and output.samefile(model):
        raise ValueError(f"Expected another file than the model to write the page to; got {str(output)!r}.")
    check_output(output, force=force, kind="a page made by ddnf", is_ours=is_page)
    fitted = load(model)
    flow, labels, values = _flow_to_show(fitted, condition)
    dims = None if columns is None else [_find_label(word, labels) for word in split_words(columns)]
    base = fitted.base if isinstance(fitted, Density) else None
    rows = None if data is None else _rows(fitted, data, reading, drop_missing)
    shown = frames(flow, values, base=base, labels=labels, dims=dims, rows=rows)
    write_atomic(output, page({model.stem: shown}, model.stem, _caption(fitted, data)))
    print(f"page            {output}")
    has_display = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not no_open and has_display:
        webbrowser.open(output.resolve().as_uri())


def _flow_to_show(
    model: Posterior | Density, condition: str | None
) -> tuple[AbstractBijection, list[str], Float[np.ndarray, " c"] | None]:
    """A model's flow to unbounded space, the names of its coordinates, and the standardized condition."""
    if isinstance(model, Posterior):
        if condition is not None:
            raise ValueError("Expected no condition for a posterior; got one.")
        if model.base is not None:
            raise ValueError("Expected a flow from a normal; got one from a mixture, whose paths cannot be shown yet.")
        return model.flow, [f"z[{i}]" for i in range(model.dim)], None
    if model.categories is not None:
        raise ValueError("Expected a density of numbers; got one with categories, which `ddnf show` draws.")
    values = None if condition is None else parse_condition(condition, model)
    if (None if values is None else len(values)) != model.condition_dim:
        raise ValueError(f"Expected {model.condition_dim or 'no'} numbers in --condition; got {len(values or ())}.")
    standardized = None
    if values is not None:
        encoded = np.asarray(encode_condition(model.schema, values), float).ravel()
        standardized = (encoded - model.condition_mean) / model.condition_scale
    scaling = TriangularAffine(jnp.asarray(model.mean), jnp.asarray(model.scale))
    names = [f"column {i}" for i in range(model.dim)] if model.names is None else model.names[: model.dim]
    labels = [_unbounded_name(name, column) for name, column in zip(names, model.columns, strict=True)]
    return Chain([model.flow, scaling]), labels, standardized


def _rows(model: Posterior | Density, data: Path, reading: Format, drop_missing: bool) -> Float[np.ndarray, "n dim"]:
    """The rows of a table in unbounded space; without those outside of the support."""
    if isinstance(model, Posterior):
        raise ValueError(f"Expected a table for a density without conditions only; got {str(data)!r} for a posterior.")
    rows = read_rows(model, data, reading, drop_missing=drop_missing)[0]
    values = np.asarray(rows, float) if model.schema is None else encode_fields(model.schema.fields, rows)
    with np.errstate(all="ignore"):
        real = to_real(model.columns, values + 0.5 * np.array([column.integer for column in model.columns]))[0]
    real = real[np.isfinite(real).all(axis=1)]
    if not len(real):
        raise ValueError(f"Expected rows in the support of the density in {str(data)!r}; got none.")
    return real


def _caption(model: Posterior | Density, data: Path | None) -> str:
    """A sentence that explains the picture, and the main figures of the fit."""
    start = "the base" if isinstance(model, Density) and model.base is not None else "a Gaussian"
    match = "" if data is None else f". They should match the crosses, which are the rows of {data.name}"
    figures = [line.strip() for line in repr(model).splitlines()[1:3]]
    figures = [line[0].upper() + line[1:] for line in figures if line]
    return ". ".join([f"Points are draws from {start} at time 0, and from the fit at time 1{match}", *figures]) + "."


def _unbounded_name(name: str, column: Column) -> str:
    """The name of a column after its transform to the real line."""
    if column.low is not None and column.high is not None:
        return f"logit {name}"
    return name if column.low is None and column.high is None else f"log {name}"


def _find_label(word: str, labels: list[str]) -> int:
    """The number of a coordinate, from its number or its name with or without the transform, as in "log price"."""
    plain = [label.removeprefix("log ").removeprefix("logit ") for label in labels]
    for names in (labels, plain, [str(i) for i in range(len(labels))]):
        if word in names:
            return names.index(word)
    raise ValueError(f"Expected columns of the model ({', '.join(labels)[:200]}); got {word!r}.")
