"""Pictures of densities and maps of the plane; they take arrays and callables and return matplotlib figures."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin

from ddnf.system.files import check_overwrite, contains_mark, open_atomic

_SOFTWARE = "ddnf"


def save(figure: Figure, path: Path, *, dpi: float) -> None:
    """Writes a figure to a PNG file, atomically. Replaces only pictures that this function made.

    The 256 colours of the palette are enough for our figures, and halve the size of the file.
    """
    check_picture(path)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi)
    info = PngImagePlugin.PngInfo()
    info.add_text("Software", _SOFTWARE)
    picture = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    with open_atomic(path) as file:
        picture.save(file, format="PNG", optimize=True, pnginfo=info)


def check_picture(path: Path) -> None:
    """Raises a ValueError if there is a file at `path` that was not made by `save`."""
    check_overwrite(path, kind="a picture made by ddnf", is_ours=_is_picture)


def _is_picture(path: Path) -> bool:
    return contains_mark(path, b"tEXtSoftware\0" + _SOFTWARE.encode())


def density(axes: Axes, log_density: Callable[[np.ndarray], np.ndarray], *, bound: float, resolution: int = 300):
    """Shades a density of the plane; `log_density` takes points (n, 2)."""
    axis = np.linspace(-bound, bound, resolution)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1)
    shade(axes, np.exp(np.asarray(log_density(grid.reshape(-1, 2)))).reshape(resolution, resolution), bound=bound)


def shade(axes: Axes, values: np.ndarray, *, bound: float):
    """Shades values (n, n) on the square [-bound, bound]^2, the first row at the bottom."""
    image(axes, values, extent=(-bound, bound, -bound, bound))
    _square(axes, bound)


def deformed_grid(
    axes: Axes, transform: Callable[[np.ndarray], np.ndarray], *, bound: float, source: float = 2.5, lines: int = 31
):
    """Draws the image of a regular grid on [-source, source]^2 under a map of points (n, 2)."""
    start = regular_grid(source=source, lines=lines)
    grid_lines(axes, np.asarray(transform(start.reshape(-1, 2))).reshape(start.shape), bound=bound)


def regular_grid(*, source: float = 2.5, lines: int = 31, points: int = 201) -> np.ndarray:
    """Points (2, lines, points, 2) on the horizontal and then on the vertical lines of a grid on [-source, source]^2.

    Example:
        >>> regular_grid(lines=3, points=5).shape
        (2, 3, 5, 2)
    """
    across, down = np.meshgrid(np.linspace(-source, source, points), np.linspace(-source, source, lines))
    return np.stack([np.stack([across, down], axis=-1), np.stack([down, across], axis=-1)])


def grid_lines(axes: Axes, grid: np.ndarray, *, bound: float):
    """Draws the lines of a grid (2, lines, points, 2), wherever its points have gone."""
    for lines, colour in zip(grid, ("tab:blue", "tab:orange"), strict=True):
        axes.add_collection(LineCollection(list(lines), colors=colour, linewidths=0.5, alpha=0.8))
    _square(axes, bound)


def displacement(axes: Axes, start: np.ndarray, end: np.ndarray, *, bound: float):
    """Draws arrows from points (n, 2) to their images under a map, at true length; dots mark the start."""
    move = end - start
    axes.quiver(*start.T, *move.T, angles="xy", scale_units="xy", scale=1, color="tab:blue", width=0.004, headwidth=4)
    axes.plot(*start.T, ".", color="0.4", markersize=1.5)
    _square(axes, bound)


def curves(axes: Axes, lines: Mapping[str, tuple[np.ndarray, np.ndarray]], *, x: str, y: str, log: str = ""):
    """Draws labelled lines with markers; `x` and `y` label the axes, those named in `log` ("x", "y", "xy") are log."""
    for label, (across, up) in lines.items():
        axes.plot(across, up, "o-", label=label, markersize=3, linewidth=1.3)
    axes.set(xlabel=x, ylabel=y, xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if lines:
        axes.legend(fontsize=8, frameon=False)


def panels(rows: Mapping[str, Mapping[str, Callable[[Axes], None]]], *, size: float = 2.6) -> Figure:
    """A figure of labelled rows of titled panels, `size` inches wide; each is a function that draws on its axes."""
    columns = max(len(row) for row in rows.values())
    figure = Figure(figsize=(size * columns, (size + 0.2) * len(rows)), layout="constrained")
    all_axes = figure.subplots(len(rows), columns, squeeze=False)
    for (label, row), axes_row in zip(rows.items(), all_axes, strict=True):
        axes_row[0].set_ylabel(label)
        for (title, draw), axes in zip(row.items(), axes_row, strict=False):
            draw(axes)
            axes.set_title(title, fontsize=9)
        for axes in axes_row[len(row) :]:
            axes.set_axis_off()
    return figure


def _square(axes: Axes, bound: float):
    axes.set(xlim=(-bound, bound), ylim=(-bound, bound), aspect="equal", xticks=[], yticks=[])


def image(axes: Axes, values: np.ndarray, *, extent: Sequence[float]):
    """Shades values on a grid over a rectangle (left, right, bottom, top)."""
    left, right, bottom, top = extent
    axes.imshow(
        values,
        origin="lower",
        extent=(left, right, bottom, top),
        cmap="magma",
        interpolation="bilinear",
        aspect="auto",
    )
    axes.set(xticks=[], yticks=[])


def scatter(axes: Axes, points: np.ndarray, *, extent: Sequence[float] | None = None):
    """Draws points (n, 2) as dots, on a rectangle (left, right, bottom, top) where one is given."""
    axes.plot(*points.T, ".", color="tab:blue", markersize=1.5, alpha=0.4)
    axes.set(xticks=[], yticks=[])
    if extent is not None:
        axes.set(xlim=extent[:2], ylim=extent[2:])


def gallery(panels: Mapping[str, Callable[[Axes], None]], *, columns: int = 6) -> Figure:
    """A figure of titled panels, as many in a row as fit; long titles are wrapped."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.2 * columns, 2.8 * rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for (title, draw), axes in zip(panels.items(), all_axes, strict=False):
        draw(axes)
        axes.set_title("\n".join(fill(line, 26) for line in title.splitlines()), fontsize=10.5)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    return figure


def marginals(axes: Axes, lines: Mapping[str, tuple[np.ndarray, np.ndarray]], *, truth: np.ndarray, x: str):
    """Draws histograms as labelled lines, each of (n + 1) edges and n values, over the area of a curve (2, m)."""
    axes.fill_between(*truth, color="0.85")
    for number, (label, (edges, values)) in enumerate(lines.items()):
        style = "-" if number < 10 else "--"
        axes.stairs(values, edges, label=label, linewidth=1.1, linestyle=style, color=f"C{number % 10}")
    axes.set(xlabel=x, yticks=[], ylim=(0, 1.5 * truth[1].max()), xlim=(truth[0].min(), truth[0].max()))
    axes.spines[["top", "right"]].set_visible(False)
