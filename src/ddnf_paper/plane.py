"""Targets in the plane: where their mass is, what of it is worth a picture, and how close a flow comes to them."""

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

from ddnf.posterior import diagnosis as judge
from ddnf_paper.targets import cancer
from ddnf_paper.targets.toy import Energy


@dataclasses.dataclass(frozen=True)
class Plane:
    """What is known of a target in the plane.

    Attributes:
        log_density: normalized, of one point.
        low, high: corners of the rectangle that holds all of it, for quadrature.
        shown: left, right, bottom and top of what is worth a picture.
    """

    log_density: Callable[[Array], Array]
    low: Sequence[float]
    high: Sequence[float]
    shown: Sequence[float]

    def pixels(self, resolution: int = 80) -> Float[np.ndarray, "n 2"]:
        """A grid over what is shown, rows from the bottom."""
        left, right, bottom, top = self.shown
        return lattice(np.linspace(left, right, resolution), np.linspace(bottom, top, resolution))

    def image(self, log_density: Callable[[Array], Array], resolution: int = 80) -> Float[np.ndarray, "n n"]:
        """A density on that grid."""
        values = judge.log_density(log_density, jnp.asarray(self.pixels(resolution)))
        return np.exp(np.asarray(values)).reshape(resolution, resolution)


class Closeness(NamedTuple):
    """KL(q|p), the mass of q that quadrature found, and the density of q in shades from 0 to 255."""

    kl: float
    mass: float
    image: Int[np.ndarray, "n n"]


def closeness(
    flow: AbstractBijection,
    plane: Plane,
    z: Float[Array | np.ndarray, "draws 2"],
    log_q: Float[Array | np.ndarray, " draws"],
) -> Closeness:
    """How close a flow is to a target: by the midpoint rule on 200 x 200 points, in double precision.

    Far from all draws, the inverse of many layers with flat tails leaves the range of single precision. Quadrature does
    not see a q that has left the plane, or one too thin for its grid; then the draws z, with their log density, tell.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> from flowjax.bijections import Affine
        >>> normal = lambda z: -jnp.sum(z**2) / 2 - jnp.log(2 * jnp.pi)
        >>> plane = Plane(normal, (-8.0, -8.0), (8.0, 8.0), (-3.0, 3.0, -3.0, 3.0))
        >>> moved = Affine(jnp.array([1.0, 0.0]), jnp.ones(2))
        >>> z, log_q = judge.draw(moved, jr.key(0), 1000)
        >>> round(closeness(moved, plane, z, log_q).kl, 6)
        0.5
    """
    points, log_p, area = _cells(plane)
    with jax.enable_x64(True):
        flow = jax.tree.map(_doubled, flow)
        every = jnp.asarray(np.concatenate([points, plane.pixels()]))
        # The flow is an argument: others of the same structure need no compiling.
        log_density = np.asarray(judge.log_prob(Transformed(StandardNormal(flow.shape), flow), every))
    inside, shown = np.split(log_density, [len(points)])
    q = np.exp(inside)
    mass = float(q.sum() * area)
    if abs(mass - 1) < 0.01:
        # Where q vanishes in floating point, q log q does too.
        kl = np.sum(np.where(q > 0, q * (inside - log_p), 0.0)) * area
    else:
        kl = np.mean(np.asarray(log_q) - np.asarray(judge.log_density(plane.log_density, jnp.asarray(z))))
    return Closeness(float(kl), mass, shades(np.exp(shown)))


def _doubled(leaf):
    """Numbers in double precision; by NumPy, which has nothing to compile for each shape."""
    return jnp.asarray(np.asarray(leaf, np.float64)) if eqx.is_inexact_array(leaf) else leaf


def shades(density: Float[np.ndarray, "..."]) -> Int[np.ndarray, "n n"]:
    """A picture: the values of a density on a square, row by row, as integers from 0 to 255.

    Example:
        >>> shades(np.array([0.0, 1.0, 2.0, 4.0])).tolist()
        [[0, 64], [128, 255]]
    """
    side = round(density.size**0.5)
    return np.round(255 * density / max(density.max(), 1e-300)).astype(int).reshape(side, side)


@lru_cache
def _cells(plane: Plane, count: int = 200) -> tuple[np.ndarray, np.ndarray, float]:
    """Midpoints of a grid over the plane, the target there, and the area of a cell."""
    low, high = np.array(plane.low), np.array(plane.high)
    across, up = (low + (high - low) * (np.arange(count)[:, None] + 0.5) / count).T
    points = lattice(across, up)
    with jax.enable_x64(True):
        log_p = np.asarray(judge.log_density(plane.log_density, jnp.asarray(points)))
    return points, log_p, float(np.prod((high - low) / count))


def lattice(across: Float[np.ndarray, " a"], up: Float[np.ndarray, " b"]) -> Float[np.ndarray, "a*b 2"]:
    """All points with these coordinates, the first running fastest."""
    return np.stack(np.meshgrid(across, up), axis=-1).reshape(-1, 2)


def of_energy(energy: Energy) -> Plane:
    """A toy energy.

    Example:
        >>> from ddnf_paper.targets.toy import ENERGIES
        >>> of_energy(ENERGIES["energy1"]).shown
        (-3.0, 3.0, -3.0, 3.0)
    """
    side, shown = energy.bound + 1, energy.shown
    return Plane(energy.log_density, (-side, -side), (side, side), (-shown, shown, -shown, shown))


def of_cancer(name: str) -> Plane:
    """A cancer posterior, "table2" or "textbook", over (logit m, log L)."""
    known = cancer.REFERENCE[name]
    mean, deviation = np.array(known["mean"]), np.array(known["deviation"])
    # The tail of log L is long above.
    low, high = mean - 8 * deviation, mean + [8, 16] * deviation
    log_density = getattr(cancer, name)
    shown = np.stack([mean - 3.5 * deviation, mean + 3.5 * deviation], axis=1).ravel()
    return Plane(lambda z: log_density(z) - known["log_z"], tuple(low), tuple(high), tuple(shown))
