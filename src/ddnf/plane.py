"""Targets in the plane: where their mass is, and what of it is worth a picture."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ddnf.targets import cancer
from ddnf.targets.toy import Energy


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

    def unit(self, log_density: Callable[[Array], Array]) -> Callable[[Array], Array]:
        """A log density carried from here to the square [-1, 1]^2."""
        low, high = np.array(self.low), np.array(self.high)
        middle, scale = jnp.asarray((low + high) / 2), jnp.asarray((high - low) / 2)
        return lambda u: log_density(middle + scale * u) + jnp.sum(jnp.log(scale))

    def image(self, log_density: Callable[[Array], Array], resolution: int = 80) -> Float[np.ndarray, "n n"]:
        """A density on a grid over what is shown."""
        left, right, bottom, top = self.shown
        across, up = jnp.linspace(left, right, resolution), jnp.linspace(bottom, top, resolution)
        grid = jnp.stack(jnp.meshgrid(across, up), axis=-1).reshape(-1, 2)
        return np.exp(np.asarray(jax.jit(jax.vmap(lambda z: log_density(z)))(grid))).reshape(resolution, resolution)


def of_energy(energy: Energy) -> Plane:
    """A toy energy.

    Example:
        >>> from ddnf.targets.toy import ENERGIES
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
