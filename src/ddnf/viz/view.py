"""An interactive view of a flow: frames between the Gaussian and the target, and the page that shows them."""

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import paramax
from flowjax.bijections import AbstractBijection, Affine, Chain, Invert, TriangularAffine
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.special import ndtr

from ddnf.flow.bijection import DDNF
from ddnf.system.files import contains_mark

_MOST_ROWS = 1000
_MOST_DIMS = 6  # all pairs of the first so many coordinates are shown
_AXIS = np.linspace(-4.2, 4.2, 141)  # of the lattice on which the Gaussian's mass is tracked
_PIXELS = 64
_CHUNK = 4096


def frames(
    flow: AbstractBijection,
    condition: Any = None,
    *,
    base: Any = None,
    key: PRNGKeyArray | None = None,
    labels: Sequence[str] | None = None,
    dims: Sequence[int] | None = None,
    rows: Float[np.ndarray, "n dim"] | None = None,
    count: int = 33,
    particles: int = 600,
) -> dict[str, Any]:
    """Positions of particles and grid lines, and the density, at times from 0 to 1: the input of `page`.

    Within a `DDNF`, a point moves along a straight line in each cell: z + s dt v(z) with 0 <= s <= 1, a fraction of an
    Euler step. Any other bijection of a chain is one straight line, (1 - s) x + s f(x). For an affine map with a
    positive diagonal, such as that of `ddnf.fit_posterior`, every intermediate map is also invertible. A `DDNF` takes
    four times as much time as any other bijection.

    In two dimensions, the density is computed from the Gaussian's mass in the cells of a fine lattice, per pixel.
    In more dimensions the page shows pairs of coordinates: the density is estimated from the particles, and the grid
    lies in the plane of the pair (all other coordinates 0 at time 0) and is projected. In one dimension, a second
    coordinate is added that does not change.

    Args:
        flow: a `DDNF`, its inverse, or a chain with them, from the base to the target.
        condition: what the flow is conditioned on, of its `cond_shape`.
        base: the distribution that the flow starts from, with `sample(key, n)` and `log_prob(rows)`; None for a
            standard normal.
        key: random key of the particles; None for a fixed one.
        labels: names of all coordinates.
        dims: at least two coordinates to show; None for the first six.
        rows: data points to compare with the fit; the page then opens at time 1. At most 1,000 are shown.
        count: number of frames.
        particles: number of particles.

    Returns:
        A dict of plain JSON values. Points are 16-bit numbers in base64: 1 to 65535 cover the box of a frame and half
        of its width on either side, 0 is a missing point. The density is stored as 8-bit square roots relative to each
        frame's maximum, the bottom row first.

    Example:
        >>> import ddnf, jax.random as jr
        >>> shown = frames(ddnf.DDNF(jr.key(0), 2, blocks=2, steps=2), count=5, particles=10)
        >>> shown["count"], shown["labels"], list(shown["grids"])
        (5, ['z[0]', 'z[1]'], ['0,1'])
    """
    dim, condition = flow.shape[0], _checked(flow, condition)
    shown = _dims(dims, dim)
    labels = [f"z[{i}]" for i in range(dim)] if labels is None else [*labels]
    if count < 2 or particles < 2 or len(labels) != dim:
        raise ValueError(f"Expected 2 frames, 2 particles, {dim} labels; got {count}, {particles}, {len(labels)}.")
    key = jr.key(0) if key is None else key
    draws = np.array(jr.normal(key, (particles, max(dim, 2))))
    if base is not None:
        draws[:, :dim] = base.sample(key, particles)
    # Coarser where there are many pairs.
    grid, kept = (_grid(13, 401), 57) if dim <= 2 else (_grid(9, 121), 21)
    pairs = list(combinations(range(2 if dim == 1 else len(shown)), 2))
    starts = [draws, *(_embedded(grid, [shown[i] for i in pair], dim) for pair in pairs)]
    if dim <= 2:
        starts.append(np.stack(np.meshgrid(_AXIS, _AXIS), axis=-1).reshape(-1, 2))
    parts = _parts(paramax.unwrap(flow))
    moved = _transformed(parts, np.concatenate(starts), condition, np.linspace(0, 1, count))
    moved, *others = np.split(moved[..., shown], np.cumsum([len(start) for start in starts])[:-1], axis=1)
    low, high = _boxes(moved)
    return dict(
        count=count,
        labels=[*labels, "(idle)"] if dim == 1 else [labels[i] for i in shown],
        stages=_stages(parts),
        boxes=np.stack([low, high], axis=-1).tolist(),
        particles=dict(count=particles, data=_packed(moved, low, high)),
        grids={
            f"{i},{j}": _grid_frames(lines.reshape(count, *grid.shape[:2], -1), low, high, pair=[i, j], kept=kept)
            for lines, (i, j) in zip(others, pairs, strict=False)
        },
        density=_density(others[-1], low, high, _mass(base, dim)) if dim <= 2 else None,
        rows=None if rows is None else _rows(rows, moved[-1, :, -1], low[-1:], high[-1:], None if dim == 1 else shown),
    )


def page(frames_by_name: Mapping[str, dict[str, Any]], title: str, caption: str = "") -> str:
    """A self-contained page with a slider over time and a choice of flows.

    Args:
        frames_by_name: the result of `frames` for each flow, by name.
        title: title of the page, as text.
        caption: an explanation of the picture, as text.

    Example:
        >>> import ddnf, jax.random as jr
        >>> shown = frames(ddnf.DDNF(jr.key(0), 2, blocks=1, steps=1), count=2, particles=2)
        >>> page({"an example": shown}, "A flow").startswith("<!doctype html>")
        True
    """
    parts = dict(TITLE=html.escape(title), CAPTION=html.escape(caption), WIDGET=widget(frames_by_name))
    return re.sub("|".join(parts), lambda match: parts[match[0]], _PAGE)


def is_page(path: Path) -> bool:
    """Whether a file is a page made by `page`, or a report made by `ddnf report`."""
    return contains_mark(path, MARK.encode())


def widget(frames_by_name: Mapping[str, dict[str, Any]]) -> str:
    """The HTML of the view alone, to be embedded in a page.

    Example:
        >>> import ddnf, jax.random as jr
        >>> shown = frames(ddnf.DDNF(jr.key(0), 2, blocks=1, steps=1), count=2, particles=2)
        >>> "<canvas" in widget({"an example": shown})
        True
    """
    if not frames_by_name:
        raise ValueError("Expected the frames of at least one flow; got none.")
    # Text in the data must not end the script element.
    data = json.dumps(dict(frames_by_name), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return files("ddnf.viz").joinpath("view.html").read_text("utf-8").replace("FRAMES", data)


# Pages with this line were made by ddnf and may be replaced.
MARK = '<meta name="generator" content="ddnf">'
# With this policy the browser loads nothing from the network.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{MARK}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark">
<title>TITLE</title>
<style>
:root {{ color-scheme: light dark; --page: #fff; --ink: #1d2330; }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #14171d; --ink: #dfe3ea; }} }}
body {{ margin: 0; padding: 1rem; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }}
main {{ max-width: 60rem; margin: auto; }}
h1 {{ font-size: 1.3rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }}
.caption {{ margin: 0 0 1rem; overflow-wrap: anywhere; }}
</style>
</head>
<body>
<main>
<h1>TITLE</h1>
<p class="caption">CAPTION</p>
WIDGET
</main>
</body>
</html>
"""


def _parts(flow: Any) -> list[AbstractBijection]:
    """The bijections of a chain, in the order in which they are applied."""
    if isinstance(flow, Chain):
        return [part for inner in flow.bijections for part in _parts(inner)]
    if isinstance(flow, Invert) and isinstance(flow.bijection, Chain):
        return [Invert(part) for part in reversed(_parts(flow.bijection))]
    return [flow]


def _stops(part: AbstractBijection, x: Array, condition: Array | None) -> Array:
    """The position of a point before a part and after each of its cells."""
    if isinstance(part, DDNF):
        end, path = part.path(x, condition)
        return jnp.concatenate([path.points.reshape(-1, len(x)), end[None]])
    if isinstance(part, Invert) and isinstance(part.bijection, DDNF):
        back = _stops(part.bijection, part.transform(x, condition), condition)
        return back[::-1].at[0].set(x)  # equal to x up to rounding
    return jnp.stack([x, part.transform(x, condition)])


def _duration(part: Any) -> int:
    return 4 if isinstance(part, DDNF) or isinstance(getattr(part, "bijection", None), DDNF) else 1


def _stages(parts) -> list[dict[str, Any]]:
    """The name of each part, its number of blocks (None if it has none), and the time at which it ends."""
    ends = np.cumsum([_duration(part) for part in parts])
    return [_stage(part) | dict(end=float(end)) for part, end in zip(parts, ends / ends[-1], strict=True)]


def _stage(part) -> dict[str, Any]:
    inner = part.bijection if isinstance(part, Invert) else part
    before = "inverse " if inner is not part else ""
    if isinstance(inner, DDNF):
        return dict(name=f"{before}flow", blocks=inner.blocks)
    name = "affine map" if isinstance(inner, Affine | TriangularAffine) else type(inner).__name__
    return dict(name=f"{before}{name}", blocks=None)


@eqx.filter_jit
def _positions(parts, x, condition, times):
    def one(x):
        stops, clock, start = [x[None]], [np.zeros(1)], 0
        for part in parts:
            passed = _stops(part, stops[-1][-1], condition)[1:]
            clock.append(start + _duration(part) * np.arange(1, len(passed) + 1) / len(passed))
            start += _duration(part)
            stops.append(passed)
        path = jnp.concatenate(stops)
        return jax.vmap(lambda z: jnp.interp(times * start, np.concatenate(clock), z), 1, 1)(path)

    return jax.vmap(one, out_axes=1)(x)


def _transformed(parts, x, condition, times) -> Float[np.ndarray, "times n dim"]:
    """Positions of points at the times, chunk by chunk: the positions in all cells are in memory for one chunk."""
    dim = parts[0].shape[0]
    padded = np.concatenate([x, np.zeros((-len(x) % _CHUNK, x.shape[1]))]).astype(jnp.result_type(float))
    chunks = np.split(padded[:, :dim], len(padded) // _CHUNK)
    moved = np.concatenate([_positions(parts, chunk, condition, times) for chunk in chunks], axis=1)[:, : len(x)]
    idle = np.broadcast_to(x[:, dim:], (len(times), len(x), x.shape[1] - dim))
    return np.concatenate([moved, idle], axis=-1)


def _grid(lines: int, points: int) -> Float[np.ndarray, "lines points 2"]:
    """The horizontal and the vertical lines of a regular grid."""
    along, ticks = np.linspace(-3, 3, points), np.linspace(-2.7, 2.7, lines)
    across = np.stack(np.meshgrid(along, ticks), axis=-1)
    return np.concatenate([across, across[..., ::-1]])


def _embedded(grid, pair, dim):
    points = np.zeros((grid[..., 0].size, max(dim, 2)))
    points[:, [0, 1] if dim == 1 else pair] = grid.reshape(-1, 2)
    return points


def _boxes(moved) -> tuple[Float[np.ndarray, "times dim"], Float[np.ndarray, "times dim"]]:
    """The visible box of each frame: the same for all frames, unless the particles would fill too little of one."""
    if not np.isfinite(moved).any(axis=1).all():
        raise ValueError("Expected a flow with finite values; got none. Does it fold? Look at ddnf.certify(flow, x).")
    low, high = np.nanquantile(np.where(np.isfinite(moved), moved, np.nan), [0.005, 0.995], axis=1)
    still = high.max(axis=0) - low.min(axis=0) < 2.5 * (high - low).min(axis=0)
    low, high = np.where(still, low.min(axis=0), low), np.where(still, high.max(axis=0), high)
    width = 1.35 * np.maximum(high - low, 1e-9)
    widest = width.max(axis=1, keepdims=True)
    # Coordinates of similar width in all frames get the same width, so that their pairs are drawn to scale.
    half = np.where((widest < 1.6 * width).all(axis=0), widest, width) / 2
    return (low + high) / 2 - half, (low + high) / 2 + half


def _grid_frames(moved, low, high, *, pair: list[int], kept: int) -> dict[str, Any]:
    """Lines reduced to `kept` points, denser where the flow expands them, where straight chords would seem to cross."""
    moved, low, high = moved[..., pair], low[:, pair], high[:, pair]
    steps = np.diff(moved, axis=2) / (high - low)[:, None, None]
    longest = np.nan_to_num(np.hypot(*np.moveaxis(steps, -1, 0))).max(axis=0)
    # Partly uniform along the line, so that parts that hardly move keep some points too.
    length = np.cumsum(longest + longest.mean(axis=1, keepdims=True) / 2, axis=1)
    places = [np.searchsorted(line, np.linspace(0, line[-1], kept)) for line in length]
    points = np.take_along_axis(moved, np.array(places)[None, :, :, None], axis=2)
    return dict(lines=len(length), points=kept, data=_packed(points.reshape(len(moved), -1, 2), low, high))


def _packed(moved, low, high) -> str:
    shares = (moved - low[:, None]) / (high - low)[:, None]
    numbers = np.clip(np.round((shares + 0.5) / 2 * 65535), 1, 65535)
    return _base64(np.where(np.isfinite(moved).all(axis=-1, keepdims=True), numbers, 0).astype("<u2"))


def _rows(rows, idle, low, high, shown) -> dict[str, Any]:
    """Points of the data in the box of the last frame, spread evenly over the rows; in one dimension, beside the
    coordinate that does not change."""
    some = np.asarray(rows, float)[:: max(1, -(-len(rows) // _MOST_ROWS))]
    some = np.stack([some[:, 0], np.resize(idle, len(some))], axis=-1) if shown is None else some[:, shown]
    return dict(count=len(some), data=_packed(some[None], low, high))


def _mass(base, dim: int) -> Float[np.ndarray, "m m"]:
    """The mass of the base in each cell of the lattice."""
    share = np.diff(ndtr(_AXIS))
    if base is None:
        return np.outer(share, share)
    centres, sizes = (_AXIS[1:] + _AXIS[:-1]) / 2, np.diff(_AXIS)
    points = np.stack(np.meshgrid(centres, centres), axis=-1)[..., :dim].reshape(-1, dim)
    density = np.exp(np.asarray(base.log_prob(jnp.asarray(points, jnp.result_type(float))))).reshape(2 * centres.shape)
    return density * np.outer(sizes if dim == 2 else share, sizes)


def _density(moved, low, high, mass) -> dict[str, Any]:
    """Images of the density of each frame, from the base's mass in the cells of the lattice."""
    images = []
    for frame, corner, width in zip(moved, low, high - low, strict=True):
        lattice = ((frame - corner) / width * _PIXELS).reshape(len(_AXIS), len(_AXIS), 2)
        images.append(_image(lattice, mass) * _PIXELS**2 / width.prod())
    peaks = np.max(images, axis=(1, 2))
    data = np.round(255 * np.sqrt(np.array(images) / peaks[:, None, None])).astype("u1")
    return dict(size=_PIXELS, peaks=peaks.tolist(), data=_base64(data))


def _image(lattice: Float[np.ndarray, "n n 2"], mass: Float[np.ndarray, "m m"]) -> Float[np.ndarray, "size size"]:
    """The mass in each pixel, with the mass of each cell of the lattice spread evenly over the cell.

    A cell is filled with points, more if its sides are longer, so that there are no gaps.
    """
    corners = np.stack([lattice[:-1, :-1], lattice[:-1, 1:], lattice[1:, :-1], lattice[1:, 1:]])
    inside = (corners.min(axis=0) < _PIXELS).all(axis=-1) & (corners.max(axis=0) > 0).all(axis=-1)
    corners, mass = corners[:, inside], mass[inside]  # cells with NaN are not inside
    across = np.abs(corners[[1, 3]] - corners[[0, 2]]).max(axis=(0, 2))
    up = np.abs(corners[[2, 3]] - corners[[0, 1]]).max(axis=(0, 2))
    levels = np.ceil(np.log2(np.clip(2 * np.stack([across, up], axis=-1), 2, 128))).astype(int)
    image = np.zeros((_PIXELS, _PIXELS))
    for a, b in np.unique(levels, axis=0).tolist():
        these = (levels == [a, b]).all(axis=-1)
        points = _filled(corners[:, these], 2**a, 2**b)
        image += _collected(points, np.broadcast_to(mass[these] / 2 ** (a + b), points.shape[:-1]))
    return image


def _filled(corners: Float[np.ndarray, "4 n 2"], across: int, up: int) -> Float[np.ndarray, "across up n 2"]:
    """Points in quadrilaterals, evenly spaced in bilinear coordinates."""
    u = ((np.arange(across) + 0.5) / across)[:, None, None, None]
    v = ((np.arange(up) + 0.5) / up)[:, None, None]
    return (1 - v) * ((1 - u) * corners[0] + u * corners[1]) + v * ((1 - u) * corners[2] + u * corners[3])


def _collected(points: Float[np.ndarray, "*n 2"], mass: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "size size"]:
    """The mass of points in each pixel, divided among the four nearest pixels; mass outside of the image is dropped."""
    inside = ((points > 0) & (points < _PIXELS)).all(axis=-1)
    place = points[inside] + 0.5  # in an image with a margin of one pixel
    corner = place.astype(int)
    part = place - corner
    image = np.zeros((_PIXELS + 2) ** 2)
    for right, up in ((0, 0), (0, 1), (1, 0), (1, 1)):
        weight = np.abs(1 - right - part[:, 0]) * np.abs(1 - up - part[:, 1])
        index = (corner[:, 1] + up) * (_PIXELS + 2) + corner[:, 0] + right
        image += np.bincount(index, mass[inside] * weight, len(image))
    return image.reshape(_PIXELS + 2, -1)[1:-1, 1:-1]


def _base64(array) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _checked(flow, condition):
    if not isinstance(flow, AbstractBijection) or len(flow.shape) != 1:
        raise ValueError(f"Expected a FlowJAX bijection of points, such as ddnf.DDNF; got {type(flow).__name__}.")
    shape = None if condition is None else np.shape(condition)
    if shape != flow.cond_shape:
        raise ValueError(f"Expected a condition of shape {flow.cond_shape}; got {shape}.")
    return None if condition is None else jnp.asarray(condition, jnp.result_type(float))


def _dims(dims, dim) -> list[int]:
    if dim == 1:
        return [0, 1]
    shown = list(range(min(dim, _MOST_DIMS))) if dims is None else [*dims]
    if len(shown) < 2 or len({*shown}) < len(shown) or not all(0 <= i < dim for i in shown):
        raise ValueError(f"Expected two or more different coordinates from 0 to {dim - 1}; got {shown}.")
    return shown
