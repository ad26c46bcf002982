"""One step of an ordinary differential equation dz/dt = v(z), as plain functions.

A solver is any function ``(velocity, z, dt) -> z_next``; these three are the ones that ship.
"""

from collections.abc import Callable

from jaxtyping import Array, Float

Velocity = Callable[[Array], Array]
Solver = Callable[[Velocity, Array, float], Array]


def euler(velocity: Velocity, z: Float[Array, "dim *lanes"], dt: float) -> Float[Array, "dim *lanes"]:
    """Euler's step z + dt v(z), Eq. (odeDisc) of the paper; first order.

    Example:
        >>> import jax.numpy as jnp
        >>> euler(lambda z: -z, jnp.array([1.0]), 0.5).tolist()
        [0.5]
    """
    return z + dt * velocity(z)


def midpoint(velocity: Velocity, z: Float[Array, "dim *lanes"], dt: float) -> Float[Array, "dim *lanes"]:
    """The explicit midpoint step z + dt v(z + dt/2 v(z)); second order.

    Example:
        >>> import jax.numpy as jnp
        >>> midpoint(lambda z: -z, jnp.array([1.0]), 0.5).tolist()
        [0.625]
    """
    return z + dt * velocity(z + dt / 2 * velocity(z))


def rk4(velocity: Velocity, z: Float[Array, "dim *lanes"], dt: float) -> Float[Array, "dim *lanes"]:
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


def expansion(solver: Solver, x: float | Array) -> float | Array | None:
    """Lipschitz bound of (step - identity) for a velocity with dt * Lipschitz constant `x`; None if unknown.

    Each stage of an explicit method multiplies in one more power of x: the bound is the truncated series of
    exp(x) - 1. Below 1 the step is a diffeomorphism (a perturbation of the identity by a contraction).

    Example:
        >>> expansion(midpoint, 0.5)
        0.625
    """
    series = {euler: (1.0,), midpoint: (1.0, 1 / 2), rk4: (1.0, 1 / 2, 1 / 6, 1 / 24)}
    if solver not in series:
        return None
    return sum(c * x ** (k + 1) for k, c in enumerate(series[solver]))
