"""The tails of a target: if they do not fall off, it has no integral; if they are heavy, it lacks moments."""

import jax.random as jr
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from ddnf.flow.random import generator
from ddnf.posterior.target import Target

IMPROPER = (
    "No mode was found; the posterior may be improper: its log density {found}. "
    "Check for flat priors, parameters that the data do not determine, and the sign of the log density."
)
# Distances at which the scale of the parameters does not matter.
_DISTANCES = (1e10, 1e12, 1e14)
_NEAR = (0.0, 1.0, 3.0, 10.0)
_DROP = 10.0
_DIRECTIONS = 64
# Axes that are looked at: those along which the density is least steep.
_AXES = 200


def check_proper(key: PRNGKeyArray, target: Target) -> None:
    """Raises if the density does not fall off along an axis or along random directions.

    Along a line, an integrable density falls faster than 1 / t; along most directions, faster than t^-dim.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr
        >>> check_proper(jr.key(0), ddnf.Target(lambda z: -jnp.log1p(jnp.sum(z**2)), 1))  # Cauchy
        >>> check_proper(jr.key(0), ddnf.Target(lambda z: -(z[0] ** 2), 2))
        Traceback (most recent call last):
        ValueError: No mode was found; the posterior may be improper: its log density does not fall off along z[1]. ...
    """
    mass = _log_mass_far_away(key, target)
    with np.errstate(invalid="ignore"):
        flat = (np.diff(mass, axis=0) >= -0.1).all(axis=0) & np.isfinite(mass).all(axis=0)
    if not flat.any():
        return
    first, axes = int(np.argmax(flat)), _axes(key, target)
    is_axis = first < 2 * len(axes)
    where = f"along z[{axes[first % len(axes)]}]" if is_axis else f"in {flat.mean():.0%} of directions"
    raise ValueError(IMPROPER.format(found=f"does not fall off {where}"))


def tail_index(key: PRNGKeyArray, target: Target) -> float:
    """The smallest nu such that the mass beyond a distance t falls like t^-nu in some direction.

    Moments of order nu and higher do not exist. It is infinite for tails that fall faster than every power.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr
        >>> cauchy = ddnf.Target(lambda z: -jnp.log1p(jnp.sum(z**2)), 1)
        >>> round(tail_index(jr.key(0), cauchy), 2)
        1.0
    """
    mass = _log_mass_far_away(key, target)
    with np.errstate(invalid="ignore"):
        index = -(mass[-1] - mass[0]) / np.log(_DISTANCES[-1] / _DISTANCES[0])
    return float(np.min(np.where(np.isfinite(index) & np.isfinite(mass).all(axis=0), index, np.inf)))


def _log_mass_far_away(key, target) -> Float[np.ndarray, "distances directions"]:
    """log(p t^k): the log mass of shells, k = 1 along both directions of the axes, k = dim along random directions.

    It is -inf if a density falls at first and is constant far away. Transforms such as that of a simplex become
    constant by rounding, which says nothing about the density.
    """
    dim, units = target.dim, np.eye(target.dim)[_axes(key, target)]
    directions = np.concatenate([units, -units, generator(key).normal(size=(_DIRECTIONS, dim))])
    powers = np.concatenate([np.ones(2 * len(units)), np.full(_DIRECTIONS, float(dim))])
    center = _center(key, target)
    distances = (*_NEAR, *_DISTANCES)
    points = center + np.concatenate([t * directions for t in distances])
    values = target.programs.values(points).reshape(len(distances), -1)
    # What grows without bound ends as infinity.
    values = np.where(np.isposinf(values), 1e300, values)
    near, far = np.split(values, [len(_NEAR)])
    best = np.max(np.where(np.isfinite(near), near, -np.inf), axis=0)
    with np.errstate(invalid="ignore"):
        is_cut_off = (np.abs(np.diff(far, axis=0)) < 0.1).all(axis=0) & (best - far[0] > _DROP)
    return np.where(is_cut_off, -np.inf, far + powers * np.log(_DISTANCES)[:, None])


def _axes(key, target) -> np.ndarray:
    if target.dim <= _AXES:
        return np.arange(target.dim)
    slope = np.nan_to_num(np.abs(target.programs.gradient(_center(key, target))[1]), nan=np.inf)
    return np.argsort(slope, kind="stable")[:_AXES]


def _center(key, target) -> np.ndarray:
    return np.asarray(target.start(jr.fold_in(key, 1)), float)
