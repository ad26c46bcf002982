"""Toy energies: two-dimensional densities p(z) proportional to exp(-U(z)).

`energy1` and `energy2` are those of the paper's Appendix A. `potential1` to `potential4` are those of Rezende and
Mohamed, "Variational inference with normalizing flows" (2015), Table 1, which have |z| where the former have |z|^2,
and width 0.6 where they have 0.8.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Energy(NamedTuple):
    """An unnormalized density in the plane.

    Attributes:
        potential: U(z), at one point.
        log_normalizer: log of the integral of exp(-U), by quadrature.
        bound: beyond +-bound in either coordinate the density is negligible.
        shown: half-width of pictures.
    """

    potential: Callable[[Array], Array]
    log_normalizer: float
    bound: float
    shown: float

    def log_density(self, z: Float[Array, " 2"]) -> Float[Array, ""]:
        """The normalized log p(z)."""
        return -self.potential(z) - self.log_normalizer


def _bump(x, width):
    """The logarithm of a bell curve of height 1."""
    return -((x / width) ** 2) / 2


def _two_arcs(squared_radius: float) -> Callable[[Array], Array]:
    def potential(z):
        modes = jnp.logaddexp(_bump(z[0] - 2, 0.8), _bump(z[0] + 2, 0.8))
        return -_bump(z @ z - squared_radius, 0.4) - modes

    return potential


def _ring(z):
    # |z| has no gradient at 0, where the density is negligible.
    radius = jnp.sqrt(z @ z + 1e-12)
    return -_bump(radius - 2, 0.4) - jnp.logaddexp(_bump(z[0] - 2, 0.6), _bump(z[0] + 2, 0.6))


def _wave(z):
    return jnp.sin(jnp.pi * z[0] / 2)


def _ends(z):
    """Rezende and Mohamed's waves are periodic, so they have no finite integral: here they decay beyond |z_1| = 4."""
    return -_bump(jnp.maximum(jnp.abs(z[0]) - 4, 0.0), 0.4)


def _one_wave(z):
    return -_bump(z[1] - _wave(z), 0.4) + _ends(z)


def _two_waves(shift: Callable[[Array], Array], width: float) -> Callable[[Array], Array]:
    def potential(z):
        from_wave = z[1] - _wave(z)
        return -jnp.logaddexp(_bump(from_wave, width), _bump(from_wave + shift(z), 0.35)) + _ends(z)

    return potential


APPENDIX = {
    "energy1": Energy(_two_arcs(4.0), 0.710462, 4.0, 3.0),
    "energy2": Energy(_two_arcs(2.0), 0.323411, 4.0, 3.0),
}
REZENDE = {
    "potential1": Energy(_ring, 1.877502, 5.0, 4.0),
    "potential2": Energy(_one_wave, 2.200167, 7.0, 5.0),
    "potential3": Energy(_two_waves(lambda z: 3 * jnp.exp(_bump(z[0] - 1, 0.6)), 0.35), 2.759783, 7.0, 5.0),
    "potential4": Energy(_two_waves(lambda z: 3 * jax.nn.sigmoid((z[0] - 1) / 0.3), 0.4), 2.828776, 7.0, 5.0),
}
ENERGIES = APPENDIX | REZENDE
