"""The toy energies of the paper's Appendix A: two-dimensional densities p(z) proportional to exp(-U(z))."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Energy(NamedTuple):
    """An unnormalized density in the plane.

    Attributes:
        potential: U(z), at one point.
        log_normalizer: log of the integral of exp(-U), by quadrature.
        bound: beyond +-bound in either coordinate the density is nil for all purposes.
    """

    potential: Callable[[Array], Array]
    log_normalizer: float
    bound: float

    def log_density(self, z: Float[Array, " 2"]) -> Float[Array, ""]:
        """The normalized log p(z)."""
        return -self.potential(z) - self.log_normalizer


def _two_arcs(squared_radius: float) -> Callable[[Array], Array]:
    def potential(z):
        ring = (z @ z - squared_radius) / 0.4
        modes = jnp.logaddexp(-(((z[0] - 2) / 0.8) ** 2) / 2, -(((z[0] + 2) / 0.8) ** 2) / 2)
        return ring**2 / 2 - modes

    return potential


# Not Rezende and Mohamed's energies: these have |z|^2, not |z|, and width 0.8.
ENERGIES = {
    "energy1": Energy(_two_arcs(4.0), 0.710462, 4.0),
    "energy2": Energy(_two_arcs(2.0), 0.323411, 4.0),
}
