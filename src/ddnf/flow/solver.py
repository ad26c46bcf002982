"""One step of an ordinary differential equation dz/dt = v(z), as plain functions.

A solver is any function ``(velocity, z, dt) -> z_next``; these three are the ones that ship.
"""

import math
from collections.abc import Callable

from jaxtyping import Array, Float

Solver = Callable[..., Array]


def euler(velocity: Callable, z: Float[Array, "dim *lanes"], dt: float) -> Float[Array, "dim *lanes"]:
    """Euler's step z + dt v(z), Eq. (odeDisc) of the paper; first order.

    Example:
        >>> import jax.numpy as jnp
        >>> euler(lambda z: -z, jnp.array([1.0]), 0.5).tolist()
        [0.5]
    """
    return z + dt * velocity(z)


def midpoint(velocity: Callable, z: Float[Array, "dim *lanes"], dt: float) -> Float[Array, "dim *lanes"]:
    """The explicit midpoint step z + dt v(z + dt/2 v(z)); second order.

    Example:
        >>> import jax.numpy as jnp
        >>> midpoint(lambda z: -z, jnp.array([1.0]), 0.5).tolist()
        [0.625]
    """
    return z + dt * velocity(z + dt / 2 * velocity(z))


def rk4(velocity: Callable, z: Float[Array, "dim *lanes"], dt: float) -> Float[Array, "dim *lanes"]:
    """The classical Runge-Kutta step; fourth order.

    Example:
        >>> import jax.numpy as jnp
        >>> round(float(rk4(lambda z: -z, jnp.array([1.0]), 0.5)[0]), 5)
        0.60677
    """
    k1 = velocity(z)
    k2 = velocity(z + dt / 2 * k1)
    k3 = velocity(z + dt / 2 * k2)
    k4 = velocity(z + dt * k3)
    return z + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def expansion(solver: Callable, x):
    """Lipschitz bound of (step - identity) for a velocity with dt * Lipschitz constant `x`.

    Each stage of an explicit method multiplies in one more power of x: the bound is the truncated series of
    exp(x) - 1. Below 1 the step is a diffeomorphism (a perturbation of the identity by a contraction). For a
    solver of one's own no bound is known: infinity.

    Example:
        >>> expansion(midpoint, 0.5)
        0.625
    """
    if solver is euler:
        return x
    if solver is midpoint:
        return x + x**2 / 2
    if solver is rk4:
        return x + x**2 / 2 + x**3 / 6 + x**4 / 24
    return math.inf + 0 * x
