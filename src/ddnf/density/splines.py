"""Maps columns to nearly normal ones, each by a monotone rational-quadratic spline that starts from data quantiles."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Array, Float
from scipy.special import ndtr, ndtri

MOST_BINS = 32
END = 3.0  # the outermost knots are mapped to -END and END
HEAVY = 30.0  # a column with values farther out than this, in standard units, gets logarithmic tails
_STEEPEST = 1e4


class ColumnSplines(AbstractBijection):
    """A monotone rational-quadratic spline on each column (Durkan et al. 2019), with linear tails.

    Between knots (x_k, y_k) with slopes d_k, with w = x_(k+1) - x_k, h = y_(k+1) - y_k, s = h / w, t = (x - x_k) / w:

        y = y_k + h (s t^2 + d_k t (1 - t)) / (s + (d_k + d_(k+1) - 2 s) t (1 - t)).

    Outside the knots, the map is linear with the slope at its end. Widths, heights and slopes are exponentials of the
    parameters, so that the map is always increasing. Columns in `heavy` are first transformed by asinh.

    Args:
        dim: number of columns.
        bins: number of bins.
        heavy: for each column, whether it has heavy tails.

    Example:
        >>> import jax.numpy as jnp
        >>> splines = ColumnSplines(2, 4)
        >>> y = splines.transform(jnp.array([0.3, -7.0]))
        >>> bool(jnp.allclose(y, jnp.array([0.3, -7.0]), atol=1e-5))  # the identity, until it is fitted or trained
        True
    """

    start: Float[Array, "dim 2"]
    log_widths: Float[Array, "dim bins"]
    log_heights: Float[Array, "dim bins"]
    log_slopes: Float[Array, "dim knots"]
    heavy: tuple[bool, ...] = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)
    cond_shape: tuple[int, ...] | None = eqx.field(static=True)

    def __init__(self, dim: int, bins: int, heavy: tuple[bool, ...] | list[bool] | None = None):
        if dim < 1 or bins < 1 or (heavy is not None and len(heavy) != dim):
            raise ValueError(f"Expected columns, bins and a flag for each column; got {dim}, {bins} and {heavy}.")
        size = float(np.log(2 * END / bins))
        real = jnp.result_type(float)  # explicit: arrays of a weak type would make training compile twice
        self.start = jnp.full((dim, 2), -END, real)
        self.log_widths = self.log_heights = jnp.full((dim, bins), size, real)
        self.log_slopes = jnp.zeros((dim, bins + 1), real)
        self.heavy = (False,) * dim if heavy is None else tuple(heavy)
        self.shape = (dim,)
        self.cond_shape = None

    def transform_and_log_det(self, x, condition=None):
        x, outer = self._tails(x)
        knots, values, slopes = self._knots()
        inner = jnp.clip(x, knots[:, 0], knots[:, -1])
        y, slope = _forward(inner, _bin(inner, knots, knots, values, slopes))
        y = y + jnp.minimum(x - knots[:, 0], 0) * slopes[:, 0] + jnp.maximum(x - knots[:, -1], 0) * slopes[:, -1]
        return y, jnp.sum(jnp.log(slope)) + outer

    def inverse_and_log_det(self, y, condition=None):
        knots, values, slopes = self._knots()
        inner = jnp.clip(y, values[:, 0], values[:, -1])
        found = _bin(inner, values, knots, values, slopes)
        x = jnp.clip(_backward(inner, found), found[0], found[1])
        slope = _forward(x, found)[1]
        x = x + jnp.minimum(y - values[:, 0], 0) / slopes[:, 0] + jnp.maximum(y - values[:, -1], 0) / slopes[:, -1]
        heavy = jnp.asarray(self.heavy)
        x = jnp.where(heavy, jnp.sinh(jnp.where(heavy, x, 0.0)), x)
        return x, -jnp.sum(jnp.log(slope)) - self._tails(x)[1]

    def _tails(self, x):
        heavy = jnp.asarray(self.heavy)
        inside = jnp.where(heavy, x, 0.0)
        # log d asinh(x)/dx = -log(1 + x^2) / 2, without the overflow of the square
        log_slope = -jnp.log(jnp.maximum(jnp.abs(inside), 1.0)) - 0.5 * jnp.log1p(
            jnp.minimum(jnp.abs(inside), 1 / jnp.maximum(jnp.abs(inside), 1.0)) ** 2
        )
        return jnp.where(heavy, jnp.arcsinh(inside), x), jnp.sum(log_slope)

    def _knots(self):
        knots = self.start[:, :1] + _from_zero(jnp.exp(self.log_widths))
        values = self.start[:, 1:] + _from_zero(jnp.exp(self.log_heights))
        return knots, values, jnp.exp(self.log_slopes)


def fit_splines(u: Float[np.ndarray, "n dim"], *, bins: int | None = None) -> ColumnSplines:
    """Splines that make each column of `u` nearly standard normal, from its quantiles.

    Args:
        u: rows, each column roughly of unit scale around zero.
        bins: number of bins; None for one that grows with the square root of the number of rows, up to 32.

    Example:
        >>> u = np.random.default_rng(0).exponential(size=(2000, 1)) - 0.7
        >>> y = np.array([fit_splines(u).transform(row) for row in u[:200]])
        >>> bool(abs(y.mean()) < 0.2) and bool(abs(y.std() - 1) < 0.2)
        True
    """
    bins = int(np.clip(np.sqrt(len(u)) / 2, 4, MOST_BINS)) if bins is None else bins
    heavy = tuple(bool(far) for far in np.abs(u).max(axis=0) > HEAVY)
    u = np.where(heavy, np.arcsinh(u), u)
    end = min(END, -ndtri(1.5 / (len(u) + 1)))
    values = _spaced(bins, end)
    knots = np.quantile(u, ndtr(values), axis=0).T
    # Ties give bins of zero width. The bound on slopes is far above the slope of any smooth column.
    heights = np.diff(values)
    widths = np.maximum(np.diff(knots, axis=1), heights / _STEEPEST)
    log_slopes = np.log(heights / widths)
    padded = np.pad(log_slopes, ((0, 0), (1, 1)), mode="edge")
    splines = ColumnSplines(u.shape[1], bins, heavy)
    start = np.stack([knots[:, 0], np.full(len(knots), values[0])], axis=1)
    log_heights = np.broadcast_to(np.log(heights), widths.shape)
    fitted = start, np.log(widths), log_heights, (padded[:, 1:] + padded[:, :-1]) / 2
    arrays = splines.start, splines.log_widths, splines.log_heights, splines.log_slopes
    new = [jnp.asarray(value, array.dtype) for value, array in zip(fitted, arrays, strict=True)]
    return eqx.tree_at(lambda s: (s.start, s.log_widths, s.log_heights, s.log_slopes), splines, new)


def map_rows(
    splines: ColumnSplines, rows: Float[np.ndarray, "n dim"]
) -> tuple[Float[np.ndarray, "n dim"], Float[np.ndarray, " n"]]:
    """Rows through splines, and the log-determinants: in NumPy and double precision, which need no compilation.

    Example:
        >>> mapped, log_det = map_rows(ColumnSplines(2, 4), np.array([[0.3, -7.0]]))
        >>> bool(np.allclose(mapped, [[0.3, -7.0]], atol=1e-5)), bool(np.allclose(log_det, 0.0, atol=1e-5))
        (True, True)
    """
    arrays = splines.start, splines.log_widths, splines.log_heights, splines.log_slopes
    start, widths, heights, slopes = (np.asarray(array, float) for array in arrays)
    columns = zip(
        rows.T.astype(float), splines.heavy, start, np.exp(widths), np.exp(heights), np.exp(slopes), strict=True
    )
    mapped, log_slopes = zip(*(_map_column(*column) for column in columns), strict=True)
    return np.stack(mapped, axis=1), np.sum(log_slopes, axis=0)


def _map_column(x, is_heavy, start, widths, heights, slopes):
    """One column through its spline, with the logarithm of its slope."""
    outer = np.zeros_like(x)
    if is_heavy:
        x, outer = np.arcsinh(x), -np.log(np.hypot(1.0, x))
    knots, values = (
        first + np.append(0.0, np.cumsum(sizes)) for first, sizes in zip(start, (widths, heights), strict=True)
    )
    inner = np.clip(x, knots[0], knots[-1])
    place = np.searchsorted(knots[1:-1], inner, side="right")
    y, slope = _forward(inner, [ends[place + more] for ends in (knots, values, slopes) for more in (0, 1)])
    y = y + np.minimum(x - knots[0], 0) * slopes[0] + np.maximum(x - knots[-1], 0) * slopes[-1]
    return y, np.log(slope) + outer


def _spaced(bins, end) -> Float[np.ndarray, " knots"]:
    """Normal quantiles for the knots: half of them evenly spread in probability, half in distance."""
    grid = np.linspace(-end, end, 2001)
    share = 0.5 * (ndtr(grid) - ndtr(-end)) / (ndtr(end) - ndtr(-end)) + 0.25 * (grid + end) / end
    return np.interp(np.linspace(0, 1, bins + 1), share, grid)


def _from_zero(sizes):
    return jnp.pad(jnp.cumsum(sizes, axis=1), ((0, 0), (1, 0)))


def _bin(value, edges, knots, values, slopes):
    """Ends (x0, x1, y0, y1) and slopes (d0, d1) of the bin in which each value lies.

    Uses a product with one-hot rows, whose gradient is also a product; the gradient of indexing would be a scatter.
    """
    place = jnp.sum(value[:, None] >= edges[:, 1:-1], axis=1)
    row = jax.nn.one_hot(place, edges.shape[1] - 1, dtype=edges.dtype)
    return [jnp.sum(row * a, axis=1) for b in (knots, values, slopes) for a in (b[:, :-1], b[:, 1:])]


def _forward(x, found):
    x0, x1, y0, y1, d0, d1 = found
    w, h = x1 - x0, y1 - y0
    s, t = h / w, (x - x0) / w
    bow = t * (1 - t)
    below = s + (d0 + d1 - 2 * s) * bow
    y = y0 + h * (s * t**2 + d0 * bow) / below
    return y, s**2 * (d1 * t**2 + 2 * s * bow + d0 * (1 - t) ** 2) / below**2


def _backward(y, found):
    """The root in [0, 1] of the quadratic equation for t."""
    x0, x1, y0, y1, d0, d1 = found
    w, h = x1 - x0, y1 - y0
    s, q = h / w, (y - y0) / h
    bend = d0 + d1 - 2 * s
    a, b, c = s - d0 + q * bend, d0 - q * bend, -s * q
    return x0 + w * 2 * c / (-b - jnp.sqrt(jnp.maximum(b**2 - 4 * a * c, 0.0)))
