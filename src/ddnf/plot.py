"""Pictures of densities and maps of the plane; they take arrays and callables and return matplotlib figures."""

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def density(axes: Axes, log_density: Callable[[np.ndarray], np.ndarray], *, bound: float, resolution: int = 300):
    """Shades a density of the plane; `log_density` takes points (n, 2)."""
    axis = np.linspace(-bound, bound, resolution)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1)
    values = np.exp(np.asarray(log_density(grid.reshape(-1, 2)))).reshape(resolution, resolution)
    axes.imshow(values, origin="lower", extent=(-bound, bound, -bound, bound), cmap="magma", interpolation="bilinear")
    _square(axes, bound)


def deformed_grid(
    axes: Axes, transform: Callable[[np.ndarray], np.ndarray], *, bound: float, source: float = 2.5, lines: int = 31
):
    """Draws where a map takes the lines of a regular grid on [-source, source]^2; it takes points (n, 2)."""
    ticks, along = np.linspace(-source, source, lines), np.linspace(-source, source, 201)
    across, down = np.meshgrid(along, ticks)
    for swap, colour in ((1, "tab:blue"), (-1, "tab:orange")):
        start = np.stack([across, down][::swap], axis=-1)
        end = np.asarray(transform(start.reshape(-1, 2))).reshape(start.shape)
        for line in end:
            axes.plot(*line.T, color=colour, linewidth=0.5, alpha=0.8)
    _square(axes, bound)


def panels(rows: Mapping[str, Mapping[str, Callable[[Axes], None]]]) -> Figure:
    """A figure of labelled rows of titled panels; each panel is a function that draws on its axes."""
    columns = max(len(row) for row in rows.values())
    figure = Figure(figsize=(2.6 * columns, 2.8 * len(rows)), layout="constrained")
    all_axes = figure.subplots(len(rows), columns, squeeze=False)
    for (label, row), axes_row in zip(rows.items(), all_axes, strict=True):
        axes_row[0].set_ylabel(label)
        for (title, draw), axes in zip(row.items(), axes_row, strict=False):
            draw(axes)
            axes.set_title(title, fontsize=9)
    return figure


def _square(axes: Axes, bound: float):
    axes.set(xlim=(-bound, bound), ylim=(-bound, bound), aspect="equal", xticks=[], yticks=[])
