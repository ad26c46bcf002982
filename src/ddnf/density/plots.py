"""A picture of a fit: pairs of columns of the table and of draws."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import PRNGKeyArray

from ddnf.density.encode import encode_fields
from ddnf.density.given import place_of
from ddnf.system.optional import require

MOST_COLUMNS = 6
_MOST_POINTS = 2000


def plot_pairs(
    density: Any, key: PRNGKeyArray, table: Any = None, *, columns: Sequence[Any] | None = None, condition: Any = None
) -> Any:
    """A matplotlib figure of pairs of columns; see `Density.plot`."""
    figure_module = require("matplotlib.figure", "plot")
    chosen = list(range(min(density.dim, MOST_COLUMNS))) if columns is None else columns
    places = [place_of(density, column) for column in chosen]
    if not places:
        raise ValueError("Expected at least one column to show; got none.")
    rows = {"draws": _numbers(density, density.sample(key, _MOST_POINTS, condition))}
    if table is not None:
        rows = {"table": _numbers(density, table)[:_MOST_POINTS]} | rows
    names = density.names or [f"column {i}" for i in range(density.dim)]
    count = len(places)
    figure = figure_module.Figure(figsize=(1.2 + 1.9 * count, 1.2 + 1.9 * count), layout="constrained")
    grid = figure.subplots(count, count, squeeze=False)
    for i, down in enumerate(places):
        for j, across in enumerate(places):
            axes = grid[i][j]
            if j > i:
                axes.set_axis_off()
                continue
            _draw(axes, density, rows, across, down)
            if i == count - 1:
                axes.set_xlabel(names[across])
            if j == 0 and i > 0:
                axes.set_ylabel(names[down])
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", frameon=False)
    return figure


def _draw(axes, density, rows, across, down):
    limits = [_limits(rows, place) for place in (across, down)]
    for number, (label, values) in enumerate(rows.items()):
        colour = f"C{number if len(rows) > 1 else 1}"
        if across == down:
            axes.hist(
                values[:, across], np.linspace(*limits[0], 41), density=True, color=colour, alpha=0.5, label=label
            )
            axes.set_yticks([])
        else:
            axes.plot(values[:, across], values[:, down], ".", color=colour, markersize=2, alpha=0.3)
            axes.set_ylim(limits[1])
    axes.set_xlim(limits[0])
    schema = density.schema
    for place, setter in ((across, axes.set_xticks), (down, axes.set_yticks)):
        if (
            schema is not None
            and schema.fields[place].kind == "category"
            and (setter == axes.set_xticks or across != down)
        ):
            levels = schema.fields[place].levels
            setter(range(len(levels)), [str(level)[:12] for level in levels])


def _limits(rows, place):
    """Axis limits that hold nearly all of the table and draws, so that distant draws do not shrink the rest."""
    ends = np.array([np.quantile(values[:, place], [0.005, 0.995]) for values in rows.values()])
    low, high = ends[:, 0].min(), ends[:, 1].max()
    margin = 0.08 * (high - low) or 0.5
    return low - margin, high + margin


def _numbers(density, table) -> np.ndarray:
    """A table as numbers, categories with a little noise so that points do not hide each other."""
    if density.schema is None:
        return np.asarray(table, float)
    values = encode_fields(density.schema.fields, table)
    noise = np.random.default_rng(0).uniform(-0.25, 0.25, values.shape)
    return values + noise * np.isin(np.arange(values.shape[1]), density.schema.categories)
