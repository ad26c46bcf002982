"""The exact inverse of one step, by Newton's method.

For an `MLPField` with Euler's step the Newton direction comes from the Woodbury identity and costs
O(d r) + O(r^3); otherwise from the d x d Jacobian of the step.
"""

import warnings
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float

from ddnf.flow import linalg as small
from ddnf.flow.field import Velocity
from ddnf.flow.log_det import identity_plus
from ddnf.flow.solver import Solver, euler

_MOST_ITERATIONS = 100
# The name under which solutions are kept for the backward pass when all else is computed again.
SOLUTION = "ddnf inverse"


def invert_step(
    solver: Solver, velocity: Callable, y: Float[Array, "dim *lanes"], *, dt: float
) -> Float[Array, "dim *lanes"]:
    """The x with ``solver(velocity, x, dt) == y``, to rounding; NaN where Newton's method did not get there.

    Differentiable in y and in all that `velocity` holds, by the implicit function theorem and to any order.

    Example:
        >>> import jax.numpy as jnp
        >>> invert_step(euler, lambda z: -z, jnp.array([1.0]), dt=0.5).tolist()
        [2.0]
    """
    # A plain function may have closed over arrays that are being differentiated: bring them into the open.
    if not isinstance(velocity, Velocity):
        velocity = eqx.filter_closure_convert(velocity, y)
    return _invert((velocity, y), solver=solver, dt=dt)


def solve_transposed(
    solver: Solver, velocity: Callable, x: Float[Array, "dim *lanes"], u: Float[Array, "dim *lanes"], *, dt: float
) -> Float[Array, "dim *lanes"]:
    """X^-T u with the Jacobian X of the step at x: how covectors, such as scores, go through the step.

    Example:
        >>> import jax.numpy as jnp
        >>> solve_transposed(euler, lambda z: z, jnp.ones(1), jnp.array([3.0]), dt=0.5).tolist()
        [2.0]
    """
    _, solve = _residual_and_solve(solver, velocity, x, x, dt)
    return jax.linear_transpose(solve, u)(u)[0]


def warn_unless(found: Bool[Array, ""]) -> None:
    """Warns, when the computation runs, that an inverse was not found; under `vmap` once for the batch."""
    _warn_unless(lax.stop_gradient(found))


@custom_vmap
def _warn_unless(found):
    lax.cond(found, lambda: None, lambda: jax.debug.callback(_warn))
    return found


@_warn_unless.def_vmap
def _warn_unless_any(size, _, found):
    return jnp.broadcast_to(_warn_unless(jnp.all(found)), size), True


def _warn():
    warnings.warn(
        "No inverse found for some points: the result is NaN there (and log_prob -inf). The flow folds, or is close "
        "to it: look at ddnf.certify(flow, x); more steps, or DDNF(..., lipschitz=0.9), prevent it.",
        RuntimeWarning,
        stacklevel=2,
    )


@eqx.filter_custom_jvp
def _invert(arguments, *, solver, dt):
    velocity, y = arguments
    return _newton(solver, velocity, y, dt)


@_invert.def_jvp
def _invert_jvp(primals, tangents, *, solver, dt):
    # step(x; v) = y, so X_x dx = dy - d_v step(x; v)
    ((velocity, y),) = primals
    ((velocity_tangent, y_tangent),) = tangents
    x = checkpoint_name(_invert((velocity, y), solver=solver, dt=dt), SOLUTION)
    _, moved = eqx.filter_jvp(lambda v: solver(v, x, dt), (velocity,), (velocity_tangent,))
    y_tangent = jnp.zeros_like(y) if y_tangent is None else y_tangent
    moved = jnp.zeros_like(y) if moved is None else moved
    _, solve = _residual_and_solve(solver, velocity, x, y, dt)
    return x, solve(y_tangent - moved)


def _newton(solver, velocity, y, dt):
    """Damped Newton iteration on every lane; a lane stops when its residual is rounding or falls no more."""

    def residual_norm(residual):
        return jnp.max(jnp.abs(residual), axis=0)

    rounding = jnp.finfo(y.dtype).eps * (1 + residual_norm(y))

    def body(state):
        count, x, direction, damping, norm, _ = state
        candidate = x - damping * direction
        residual, solve = _residual_and_solve(solver, velocity, candidate, y, dt)
        candidate_norm = residual_norm(residual)
        better = candidate_norm < norm
        x = jnp.where(better, candidate, x)
        direction = jnp.where(better, solve(residual), direction)
        # A full step again after success; half of the failed one otherwise.
        damping = jnp.where(better, 1.0, damping / 2)
        norm = jnp.where(better, candidate_norm, norm)
        # Done at rounding; or near it, when a step has failed to improve; or when no step improves at all.
        done = (norm <= 2 * rounding) | ((damping < 1) & (norm <= 100 * rounding)) | (damping < 1e-4)
        return count + 1, x, direction, damping, norm, done

    def unfinished(state):
        return (state[0] < _MOST_ITERATIONS) & ~jnp.all(state[-1])

    # The paper's inverse, one step with -v, is the first guess.
    lanes = y.shape[1:]
    guess = solver(lambda z: -velocity(z), y, dt)
    start = (0, y, y - guess, jnp.ones(lanes, y.dtype), jnp.full(lanes, jnp.inf, y.dtype), jnp.zeros(lanes, bool))
    _, x, _, _, norm, _ = lax.while_loop(unfinished, body, start)
    return jnp.where(norm <= 1e3 * rounding, x, jnp.nan)


def _residual_and_solve(solver, velocity, x, y, dt):
    """step(x) - y, and the linear map that solves with the Jacobian of the step at x."""
    if solver is euler and isinstance(velocity, Velocity):
        linear = velocity.linearize(x)
        # The core is held by columns, so this is the transposed inverse: sum over its first index.
        inverse = small.inverse(identity_plus(dt, linear.core()))

        def solve(u):
            return u - dt * linear.left(jnp.sum(inverse * linear.right(u)[:, None], axis=0))

        return (x - y) + dt * linear.velocity, solve
    jacobian = jax.jacfwd(lambda z: solver(velocity, z, dt))(x)
    return solver(velocity, x, dt) - y, lambda u: jnp.linalg.solve(jacobian, u)
