"""Numbers that say how good a fit is."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class QuadratureKL(NamedTuple):
    """KL(q|p) by quadrature, with the mass of q that the quadrature saw (close to 1 if it can be trusted)."""

    kl: float
    mass: float


def plane_grid(bound: float, resolution: int) -> tuple[Float[Array, "n n 2"], float]:
    """Midpoints of a regular grid over [-bound, bound]^2, and the area of a cell.

    Example:
        >>> grid, area = plane_grid(1.0, 4)
        >>> grid.shape, area
        ((4, 4, 2), 0.25)
    """
    side = 2 * bound / resolution
    axis = -bound + side * (jnp.arange(resolution) + 0.5)
    return jnp.stack(jnp.meshgrid(axis, axis, indexing="xy"), axis=-1), side * side


def kl_by_quadrature(
    log_q: Callable[[Array], Array], log_p: Callable[[Array], Array], *, bound: float, resolution: int = 400
) -> QuadratureKL:
    """KL(q|p), the integral of q (log q - log p), over the square [-bound, bound]^2.

    Args:
        log_q, log_p: normalized log densities of one point of the plane.
        bound: half the side of the square, which must hold (nearly) all of q.
        resolution: number of grid points along each side.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.scipy.stats import norm
        >>> kl, mass = kl_by_quadrature(
        ...     lambda z: norm.logpdf(z).sum(), lambda z: norm.logpdf(z, 1.0).sum(), bound=8.0
        ... )
        >>> round(float(kl), 4), round(float(mass), 4)
        (1.0, 1.0)
    """
    grid, area = plane_grid(bound, resolution)
    points = grid.reshape(-1, 2)
    q_values, p_values = (jax.jit(jax.vmap(f))(points) for f in (log_q, log_p))
    q = jnp.exp(q_values)
    # Where q vanishes in floating point, q log q does too.
    integrand = jnp.where(q > 0, q * (q_values - p_values), 0.0)
    return QuadratureKL(float(jnp.sum(integrand) * area), float(jnp.sum(q) * area))
