"""One step of a bound field: the only place that knows how its Jacobian is held.

With the increment g(z) = step(z) - z and its Jacobian X, a step provides the next point and, at any z, the determinant
of I + X, solutions of linear systems with it, and matrices with the traces of X. `FactoredEulerStep` does this with r x
r algebra for fields whose Jacobian is a product A B of rank r; `AutodiffStep` with the d x d Jacobian, for any field
and solver. Rules for the log-determinant, Newton's method, scores and the certificate are written against this
interface.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddnf.flow import linalg
from ddnf.flow.newton import invert


class AbstractBoundField(eqx.Module):
    """A velocity field at one condition: z -> v(z)."""

    @abstractmethod
    def __call__(self, z: Float[Array, "dim *lanes"]) -> Float[Array, "dim *lanes"]:
        """The velocity at z."""

    @abstractmethod
    def step(self, solver: Any, dt: Any) -> "AbstractStep":
        """One step of a solver over time dt."""

    @abstractmethod
    def divergence(self, z: Float[Array, "dim *lanes"]) -> tuple[Float[Array, "dim *lanes"], Float[Array, "*lanes"]]:
        """The velocity at z, and the trace of its Jacobian there."""

    @abstractmethod
    def reversed(self) -> "AbstractBoundField":
        """The field -v."""

    @abstractmethod
    def slowed_to(self, limit: float) -> "AbstractBoundField":
        """The same field, slower where needed so that its Lipschitz constant is at most `limit`."""

    @abstractmethod
    def lipschitz(self) -> Float[Array, "*lanes"]:
        """An upper bound on |J|_2 that holds for all z; infinity where none is known."""


class BoundFunction(AbstractBoundField):
    """Any callable ``field(z, *condition) -> v`` at one condition, times a gain."""

    field: Callable
    condition: tuple[Any, ...] = ()
    gain: float = eqx.field(static=True, default=1.0)

    def __call__(self, z):
        return self.gain * self.field(z, *self.condition) if self.gain != 1 else self.field(z, *self.condition)

    def step(self, solver, dt):
        return AutodiffStep(solver, self, dt)

    def divergence(self, z):
        return self(z), jnp.trace(jax.jacfwd(self)(z))

    def reversed(self):
        return BoundFunction(self.field, self.condition, -self.gain)

    def slowed_to(self, limit):
        raise ValueError("Expected a field with a known Lipschitz constant; got a custom field.")

    def lipschitz(self):
        return jnp.array(jnp.inf)


@runtime_checkable
class Linearization(Protocol):
    """A velocity and its Jacobian J = A B of rank r, as products that never build a d x d matrix."""

    velocity: Array

    def right(self, x: Array) -> Array:
        """B x."""
        ...

    def left(self, w: Array) -> Array:
        """A w."""
        ...

    def core(self) -> Any:
        """The r x r matrix B A, as a sequence (or leading axis) of its columns."""
        ...


class AbstractFactoredField(AbstractBoundField):
    """A bound field that knows its Jacobian in factored form: Euler steps of it take r x r algebra."""

    @abstractmethod
    def linearize(self, z: Float[Array, "dim *lanes"]) -> Linearization:
        """The velocity at z, with its Jacobian."""

    def __call__(self, z):
        return self.linearize(z).velocity

    def step(self, solver, dt):
        return (FactoredEulerStep if solver.is_euler else AutodiffStep)(solver, self, dt)

    def divergence(self, z):
        linear = self.linearize(z)
        return linear.velocity, trace(linear.core())


class AbstractTangent(eqx.Module):
    """A step at one point: where it leads, and its Jacobian I + X there."""

    end: eqx.AbstractVar[Float[Array, "dim *lanes"]]

    @abstractmethod
    def slog_det(self) -> tuple[Float[Array, "*lanes"], Float[Array, "*lanes"]]:
        """Sign and logarithm of the absolute determinant of I + X."""

    @abstractmethod
    def reduced(self) -> Float[Array, "n n *lanes"]:
        """A matrix whose powers have the traces of the powers of X."""

    @abstractmethod
    def square(self) -> Float[Array, "*lanes"]:
        """tr(X^T X)."""

    @abstractmethod
    def residual(self, y: Float[Array, "dim *lanes"]) -> Float[Array, "dim *lanes"]:
        """end - y."""

    @abstractmethod
    def solver(self) -> Callable[[Array], Array]:
        """The linear map u -> (I + X)^-1 u."""

    def solve_transposed(self, u: Float[Array, "dim *lanes"]) -> Float[Array, "dim *lanes"]:
        """(I + X)^-T u: how covectors, such as scores, go through the step."""
        return jax.linear_transpose(self.solver(), u)(u)[0]


class AbstractStep(eqx.Module):
    """One step of a solver through a bound field."""

    solver: eqx.AbstractVar[Callable]
    field: eqx.AbstractVar[AbstractBoundField]
    dt: eqx.AbstractVar[Any]

    def apply(self, z: Float[Array, "dim *lanes"]) -> Float[Array, "dim *lanes"]:
        """The point after the step."""
        return self.solver(self.field, z, self.dt)

    @abstractmethod
    def at(self, z: Float[Array, "dim *lanes"]) -> AbstractTangent:
        """The step with its Jacobian at z."""

    def reversed(self) -> "AbstractStep":
        """The step with -v: the paper's inverse."""
        return self.field.reversed().step(self.solver, self.dt)

    def apply_and_slog_det(self, z: Array) -> tuple[Array, Array, Array]:
        """The point after the step, and the sign and logarithm of the absolute determinant of its Jacobian."""
        tangent = self.at(z)
        return tangent.end, *tangent.slog_det()

    def push(self, z: Float[Array, " dim"]) -> tuple[Float[Array, " dim"], Callable[[Array], Array]]:
        """The point after the step, and the linear map w -> X w."""
        increment, push = jax.linearize(lambda z: self.apply(z) - z, z)
        return z + increment, push

    def inverse(self, y: Float[Array, "dim *lanes"]) -> Float[Array, "dim *lanes"]:
        """The x with apply(x) == y, to rounding; NaN where Newton's method did not find it."""
        return invert(self, y)


class FactoredEulerStep(AbstractStep):
    """Euler's step of a field whose Jacobian is J = A B.

    det(I_d + dt A B) = det(I_r + dt B A)                       (Sylvester)
    (I_d + dt A B)^-1 = I_d - dt A (I_r + dt B A)^-1 B          (Woodbury)

    so everything costs O(d r) + O(r^3).
    """

    solver: Callable = eqx.field(static=True)
    field: Any
    dt: Any

    def at(self, z):
        linear = self.field.linearize(z)
        return FactoredTangent(z + self.dt * linear.velocity, z, linear, self.dt)

    def push(self, z):
        increment, push = jax.linearize(lambda z: self.dt * self.field(z), z)
        return z + increment, push


class FactoredTangent(AbstractTangent):
    """See `FactoredEulerStep`."""

    end: Float[Array, "dim *lanes"]
    start: Float[Array, "dim *lanes"]
    linear: Any
    dt: Any

    def slog_det(self):
        return linalg.slog_det(_identity_plus(self.dt, self.linear.core()))

    def reduced(self):
        core = self.linear.core()
        return self.dt * (core if isinstance(core, Array) else jnp.stack(list(core)))

    def square(self):
        # tr(J^T J) = tr((A^T A) (B B^T)) for J = A B
        b = jax.vmap(self.linear.right)(jnp.eye(len(self.start), dtype=self.start.dtype))
        a = jax.vmap(self.linear.left)(jnp.eye(b.shape[1], dtype=self.start.dtype))
        return self.dt**2 * jnp.einsum("id...,jd...,ki...,kj...->...", a, a, b, b)

    def residual(self, y):
        return (self.start - y) + self.dt * self.linear.velocity

    def solver(self):
        # The core is held by columns, so this is the transposed inverse: sum over its first index.
        inverse = linalg.inverse(_identity_plus(self.dt, self.linear.core()))

        def solve(u):
            return u - self.dt * self.linear.left(jnp.sum(inverse * self.linear.right(u)[:, None], axis=0))

        return solve


class AutodiffStep(AbstractStep):
    """One step of any solver through any field; its d x d Jacobian is taken by autodiff."""

    solver: Callable = eqx.field(static=True)
    field: AbstractBoundField
    dt: Any

    def at(self, z):
        def twice(z):
            end = self.apply(z)
            return end, end

        jacobian, end = jax.jacfwd(twice, has_aux=True)(z)
        return AutodiffTangent(end, jacobian)

    def inverse(self, y):
        # A plain function may have closed over arrays that are being differentiated: make them arguments.
        field = BoundFunction(eqx.filter_closure_convert(self.field, y))
        return invert(AutodiffStep(self.solver, field, self.dt), y)


class AutodiffTangent(AbstractTangent):
    """See `AutodiffStep`."""

    end: Float[Array, " dim"]
    jacobian: Float[Array, "dim dim"]

    def slog_det(self):
        return linalg.slog_det(self.jacobian)

    def reduced(self):
        return self.jacobian - jnp.eye(len(self.end), dtype=self.end.dtype)

    def square(self):
        return jnp.sum(self.reduced() ** 2)

    def residual(self, y):
        return self.end - y

    def solver(self):
        return lambda u: jnp.linalg.solve(self.jacobian, u)


def trace(columns: Any) -> Array:
    """The trace of a matrix, held as an array or as a sequence of columns."""
    return reduce(add, (columns[i][i] for i in range(len(columns))))


def _identity_plus(dt: float, columns) -> list[list[Array]] | Array:
    """(I + dt M)^T for a matrix given by its columns: as rows of entries if small, else as one array."""
    if len(columns) <= linalg.LARGEST_CLOSED:
        return [[dt * c[i] + (1.0 if i == j else 0.0) for i in range(len(columns))] for j, c in enumerate(columns)]
    stacked = columns if isinstance(columns, Array) else jnp.stack(list(columns))
    eye = jnp.eye(len(stacked), dtype=stacked.dtype)
    return dt * stacked + eye.reshape(eye.shape + (1,) * (stacked.ndim - 2))
