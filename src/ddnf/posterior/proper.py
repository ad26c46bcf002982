"""Does a target fall off far away? One that does not has no integral."""

import jax.random as jr
import numpy as np
from jaxtyping import PRNGKeyArray

from ddnf.flow.random import generator
from ddnf.posterior.evaluate import log_density
from ddnf.posterior.target import Target

IMPROPER = (
    "No mode was found, the posterior may be improper: its log density {found}. "
    "Check for flat priors, parameters that the data do not determine, and the sign of the log density."
)
# So far away that the scale of the parameters does not matter.
_DISTANCES = (1e10, 1e12, 1e14)
_DIRECTIONS = 64
_AXES = 200


def check_proper(key: PRNGKeyArray, target: Target) -> None:
    """Raises if the density does not fall off along an axis or along random directions.

    Along a line, an integrable density falls faster than 1 / t; along most directions, faster than t^-dim.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr
        >>> check_proper(jr.key(0), ddnf.Target(lambda z: -jnp.log1p(jnp.sum(z**2)), 1))  # Cauchy
        >>> check_proper(jr.key(0), ddnf.Target(lambda z: -(z[0] ** 2), 2))
        Traceback (most recent call last):
        ValueError: No mode was found, the posterior may be improper: its log density does not fall off along z[1]. ...
    """
    dim = target.dim
    axes = np.arange(min(dim, _AXES))
    units = np.eye(dim)[axes]
    free = generator(key).normal(size=(_DIRECTIONS, dim))
    directions = np.concatenate([units, -units, free])
    powers = np.concatenate([np.ones(2 * len(axes)), np.full(_DIRECTIONS, float(dim))])
    center = np.asarray(target.start(jr.fold_in(key, 1)), float)
    points = center + np.concatenate([t * directions for t in _DISTANCES])
    values = np.asarray(log_density(target.log_density, points), float).reshape(len(_DISTANCES), -1)
    # What grows without bound ends as infinity.
    values = np.where(np.isposinf(values), 1e300, values)
    mass = values + powers * np.log(_DISTANCES)[:, None]
    with np.errstate(invalid="ignore"):
        flat = (np.diff(mass, axis=0) >= -0.1).all(axis=0) & np.isfinite(mass).all(axis=0)
    if not flat.any():
        return
    first = int(np.argmax(flat))
    where = f"along z[{axes[first % len(axes)]}]" if first < 2 * len(axes) else f"in {flat.mean():.0%} of directions"
    raise ValueError(IMPROPER.format(found=f"does not fall off {where}"))
