"""Explicit solvers of dz/dt = v(z): one step each.

A solver is called as ``solver(velocity, z, dt) -> z_next``. Those of this library also know a Lipschitz bound of their
step, and `solver.step(velocity, dt)` gives the step as an object with log-determinant and inverse. A plain function of
the same signature works wherever a solver is expected.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from ddnf.flow.step import AbstractBoundField, AbstractStep, BoundFunction


@dataclasses.dataclass(frozen=True)
class Solver(ABC):
    """One step of an explicit method."""

    @abstractmethod
    def __call__(self, velocity: Callable, z: Float[Array, "dim *lanes"], dt: float) -> Float[Array, "dim *lanes"]:
        """The point after one step from z."""

    @abstractmethod
    def expansion(self, x: Any) -> Any:
        """Lipschitz bound of (step - identity) for a velocity with dt * Lipschitz constant `x`.

        Each stage multiplies in one more power of x: the bound is the truncated series of exp(x) - 1. Below 1 the step
        is a diffeomorphism (a perturbation of the identity by a contraction).
        """

    @property
    def is_euler(self) -> bool:
        """Whether the Jacobian of the step is I + dt J, with J that of the velocity."""
        return False

    def step(self, velocity: Callable, dt: float) -> AbstractStep:
        """The step of a velocity over time dt, with its log-determinant and inverse.

        Example:
            >>> import jax.numpy as jnp
            >>> euler.step(lambda z: -z, 0.5).inverse(jnp.ones(1)).tolist()
            [2.0]
        """
        bound = velocity if isinstance(velocity, AbstractBoundField) else BoundFunction(velocity)
        return bound.step(self, dt)


class Euler(Solver):
    """Euler's step z + dt v(z), Eq. (odeDisc) of the paper; first order.

    Example:
        >>> import jax.numpy as jnp
        >>> euler(lambda z: -z, jnp.array([1.0]), 0.5).tolist()
        [0.5]
    """

    def __call__(self, velocity: Callable, z: Float[Array, "dim *lanes"], dt: float) -> Float[Array, "dim *lanes"]:
        return z + dt * velocity(z)

    def expansion(self, x: Any) -> Any:
        return x

    @property
    def is_euler(self) -> bool:
        return True


class Midpoint(Solver):
    """The explicit midpoint step z + dt v(z + dt/2 v(z)); second order.

    Example:
        >>> import jax.numpy as jnp
        >>> midpoint(lambda z: -z, jnp.array([1.0]), 0.5).tolist()
        [0.625]
        >>> midpoint.expansion(0.5)
        0.625
    """

    def __call__(self, velocity: Callable, z: Float[Array, "dim *lanes"], dt: float) -> Float[Array, "dim *lanes"]:
        return z + dt * velocity(z + dt / 2 * velocity(z))

    def expansion(self, x: Any) -> Any:
        return x + x**2 / 2


class RK4(Solver):
    """The classical Runge-Kutta step; fourth order.

    Example:
        >>> import jax.numpy as jnp
        >>> round(float(rk4(lambda z: -z, jnp.array([1.0]), 0.5)[0]), 5)
        0.60677
    """

    def __call__(self, velocity: Callable, z: Float[Array, "dim *lanes"], dt: float) -> Float[Array, "dim *lanes"]:
        k1 = velocity(z)
        k2 = velocity(z + dt / 2 * k1)
        k3 = velocity(z + dt / 2 * k2)
        k4 = velocity(z + dt * k3)
        return z + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def expansion(self, x: Any) -> Any:
        return x + x**2 / 2 + x**3 / 6 + x**4 / 24


@dataclasses.dataclass(frozen=True)
class FunctionSolver(Solver):
    """A function ``(velocity, z, dt) -> z_next`` of a user; no Lipschitz bound is known."""

    function: Callable[..., Array]

    def __call__(self, velocity: Callable, z: Float[Array, "dim *lanes"], dt: float) -> Float[Array, "dim *lanes"]:
        return self.function(velocity, z, dt)

    def expansion(self, x: Any) -> Any:
        return math.inf + 0 * x


# One assignment each, with a docstring: the reference is made from the source.
euler = Euler()
"""Euler's step z + dt v(z); first order, with the exact log-determinant at the cost of the narrowest layer."""
midpoint = Midpoint()
"""The explicit midpoint step z + dt v(z + dt/2 v(z)); second order."""
rk4 = RK4()
"""The classical Runge-Kutta step; fourth order."""


def as_solver(solver: Callable) -> Solver:
    """A solver as it is; any other function as a `FunctionSolver`."""
    return solver if isinstance(solver, Solver) else FunctionSolver(solver)
