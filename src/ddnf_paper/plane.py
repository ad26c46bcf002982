"""Targets in the plane: the rectangle that holds their mass, the part worth a picture, and KL(q|p) by quadrature."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection
from flowjax.distributions import StandardNormal, Transformed
from jaxtyping import Array, Float, Int

from ddnf.posterior import log_density as evaluate
from ddnf.posterior import log_prob
from ddnf_paper.targets import cancer
from ddnf_paper.targets.toy import Energy


@dataclasses.dataclass(frozen=True)
class Plane:
    """A normalized target in the plane.

    Attributes:
        log_density: normalized log density of one point.
        low, high: corners of the rectangle for quadrature, which holds nearly all of its mass.
        shown: left, right, bottom and top of pictures.
    """

    log_density: Callable[[Array], Array]
    low: Sequence[float]
    high: Sequence[float]
    shown: Sequence[float]

    def pixels(self, resolution: int = 80) -> Float[np.ndarray, "n 2"]:
        """A grid over the part shown, rows from the bottom."""
        left, right, bottom, top = self.shown
        return lattice(np.linspace(left, right, resolution), np.linspace(bottom, top, resolution))

    def image(self, log_density: Callable[[Array], Array], resolution: int = 80) -> Float[np.ndarray, "n n"]:
        """The density on that grid."""
        values = evaluate(log_density, jnp.asarray(self.pixels(resolution)))
        return np.exp(np.asarray(values)).reshape(resolution, resolution)


class Closeness(NamedTuple):
    """KL(q|p), the mass of q that quadrature found, and an image of q with values from 0 to 255."""

    kl: float
    mass: float
    image: Int[np.ndarray, "n n"]


def closeness(
    flow: AbstractBijection,
    plane: Plane,
    z: Float[Array | np.ndarray, "draws 2"],
    log_q: Float[Array | np.ndarray, " draws"],
) -> Closeness:
    """KL(q|p) between a flow and a target: by the midpoint rule on 200 x 200 points, in double precision.

    In single precision the inverse of many layers with flat tails overflows far from all draws. Quadrature misses a q
    that has left the rectangle, or one too thin for the grid: then KL is estimated from the draws z and their log q.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> from flowjax.bijections import Affine
        >>> normal = lambda z: -jnp.sum(z**2) / 2 - jnp.log(2 * jnp.pi)
        >>> plane = Plane(normal, (-8.0, -8.0), (8.0, 8.0), (-3.0, 3.0, -3.0, 3.0))
        >>> moved = Affine(jnp.array([1.0, 0.0]), jnp.ones(2))
        >>> from ddnf.posterior import draw
        >>> z, log_q = draw(moved, jr.key(0), 1000)
        >>> round(closeness(moved, plane, z, log_q).kl, 6)
        0.5
    """
    points, log_p, area = _cells(plane)
    with jax.enable_x64(True):
        flow = jax.tree.map(_doubled, flow)
        points_and_pixels = jnp.asarray(np.concatenate([points, plane.pixels()]))
        # The flow is an argument of the compiled function: flows of the same structure share it.
        log_density = np.asarray(log_prob(Transformed(StandardNormal(flow.shape), flow), points_and_pixels))
    inside, shown = np.split(log_density, [len(points)])
    kl, mass = quadrature_kl(inside, log_p, area)
    if abs(mass - 1) >= 0.01:
        kl = float(np.mean(np.asarray(log_q) - np.asarray(evaluate(plane.log_density, jnp.asarray(z)))))
    return Closeness(kl, mass, shades(np.exp(shown)))


def quadrature_kl(log_q: Float[np.ndarray, " n"], log_p: Float[np.ndarray, " n"], area: float) -> tuple[float, float]:
    """KL(q|p), the integral of q (log q - log p), and the mass of q, from values on a grid with cells of this area.

    The KL can be trusted if the mass is close to 1.

    Example:
        >>> from scipy.stats import norm
        >>> points, area = midpoint_grid((-8.0, -8.0), (8.0, 8.0), 200)
        >>> log_q, log_p = norm.logpdf(points).sum(axis=1), norm.logpdf(points, 1.0).sum(axis=1)
        >>> [round(value, 4) for value in quadrature_kl(log_q, log_p, area)]
        [1.0, 1.0]
    """
    q = np.exp(log_q)
    # Where q underflows, so does q log q.
    return float(np.sum(np.where(q > 0, q * (log_q - log_p), 0.0)) * area), float(q.sum() * area)


def _doubled(leaf):
    """Arrays in double precision; by NumPy, which compiles nothing."""
    return jnp.asarray(np.asarray(leaf, np.float64)) if eqx.is_inexact_array(leaf) else leaf


def shades(density: Float[np.ndarray, "..."]) -> Int[np.ndarray, "n n"]:
    """An image of a density: its values on a square grid, row by row, scaled to integers from 0 to 255.

    Example:
        >>> shades(np.array([0.0, 1.0, 2.0, 4.0])).tolist()
        [[0, 64], [128, 255]]
    """
    side = round(density.size**0.5)
    return np.round(255 * density / max(density.max(), 1e-300)).astype(int).reshape(side, side)


@lru_cache
def _cells(plane: Plane) -> tuple[np.ndarray, np.ndarray, float]:
    """Midpoints of a grid over the plane, the target's log density there, and the area of a cell."""
    points, area = midpoint_grid(plane.low, plane.high, 200)
    with jax.enable_x64(True):
        log_p = np.asarray(evaluate(plane.log_density, jnp.asarray(points)))
    return points, log_p, area


def midpoint_grid(low: Sequence[float], high: Sequence[float], count: int) -> tuple[Float[np.ndarray, "n 2"], float]:
    """Midpoints of count x count cells of a rectangle, the first coordinate varying fastest, and the area of a cell.

    Example:
        >>> points, area = midpoint_grid((0.0, 0.0), (1.0, 2.0), 2)
        >>> points.tolist(), area
        ([[0.25, 0.5], [0.75, 0.5], [0.25, 1.5], [0.75, 1.5]], 0.5)
    """
    return lattice(*midpoints(low, high, count).T), float(np.prod((np.array(high) - np.array(low)) / count))


def midpoints(low: Sequence[float], high: Sequence[float], count: int) -> Float[np.ndarray, "count 2"]:
    """Midpoints of `count` equal cells between low and high, along each axis."""
    first, last = np.array(low), np.array(high)
    return first + (last - first) * (np.arange(count)[:, None] + 0.5) / count


def lattice(across: Float[np.ndarray, " a"], up: Float[np.ndarray, " b"]) -> Float[np.ndarray, "a*b 2"]:
    """All points with these coordinates, the first coordinate varying fastest."""
    return np.stack(np.meshgrid(across, up), axis=-1).reshape(-1, 2)


def of_energy(energy: Energy) -> Plane:
    """The plane of a toy energy.

    Example:
        >>> from ddnf_paper.targets.toy import ENERGIES
        >>> of_energy(ENERGIES["energy1"]).shown
        (-3.0, 3.0, -3.0, 3.0)
    """
    side, shown = energy.bound + 1, energy.shown
    return Plane(energy.log_density, (-side, -side), (side, side), (-shown, shown, -shown, shown))


def of_cancer(name: str) -> Plane:
    """The plane of a cancer posterior, "table2" or "textbook", over (logit m, log L)."""
    known = cancer.REFERENCE[name]
    mean, deviation = np.array(known["mean"]), np.array(known["deviation"])
    # log L has a long upper tail.
    low, high = mean - 8 * deviation, mean + [8, 16] * deviation
    log_density = getattr(cancer, name)
    shown = np.stack([mean - 3.5 * deviation, mean + 3.5 * deviation], axis=1).ravel()
    return Plane(lambda z: log_density(z) - known["log_z"], tuple(low), tuple(high), tuple(shown))
