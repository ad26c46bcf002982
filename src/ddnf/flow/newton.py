"""The exact inverse of one step, by Newton's method."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float

_MOST_ITERATIONS = 100
# The name under which solutions are kept for the backward pass when everything else is recomputed.
SOLUTION = "ddnf inverse"


def invert(step: eqx.Module, y: Float[Array, "dim *lanes"]) -> Float[Array, "dim *lanes"]:
    """The x with ``step.apply(x) == y``, to rounding; NaN where Newton's method did not find it.

    Differentiable in y and in the parameters of the step, by the implicit function theorem and to any order.

    Example:
        >>> import jax.numpy as jnp
        >>> from ddnf import euler
        >>> invert(euler.step(lambda z: -z, 0.5), jnp.array([1.0])).tolist()
        [2.0]
    """
    return _invert((step, y))


def warn_unless(found: Bool[Array, ""]) -> None:
    """Warns at run time if an inverse was not found; under `vmap`, once per batch."""
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
        "No inverse found for some points: the result is NaN there (and log_prob is -inf). The flow folds or nearly "
        "folds; check it with ddnf.certify(flow, x). To prevent folds, use more steps or DDNF(..., lipschitz=0.9).",
        RuntimeWarning,
        stacklevel=2,
    )


@eqx.filter_custom_jvp
def _invert(arguments):
    step, y = arguments
    return _newton(step, y)


@_invert.def_jvp
def _invert_jvp(primals, tangents):
    # step(x; v) = y, so (I + X) dx = dy - d_v step(x; v)
    ((step, y),) = primals
    ((step_tangent, y_tangent),) = tangents
    x = checkpoint_name(_invert((step, y)), SOLUTION)
    _, moved = eqx.filter_jvp(lambda step: step.apply(x), (step,), (step_tangent,))
    y_tangent = jnp.zeros_like(y) if y_tangent is None else y_tangent
    moved = jnp.zeros_like(y) if moved is None else moved
    return x, step.at(x).solver()(y_tangent - moved)


def _newton(step, y):
    """Damped Newton iteration on every lane; a lane stops when its residual is rounding or does not fall any more."""

    def norm_of(residual):
        return jnp.max(jnp.abs(residual), axis=0)

    rounding = jnp.finfo(y.dtype).eps * (1 + norm_of(y))

    def body(state):
        count, x, direction, damping, norm, _ = state
        candidate = x - damping * direction
        tangent = step.at(candidate)
        residual = tangent.residual(y)
        candidate_norm = norm_of(residual)
        better = candidate_norm < norm
        x = jnp.where(better, candidate, x)
        direction = jnp.where(better, tangent.solver()(residual), direction)
        # A full step again after success; half of the failed one otherwise.
        damping = jnp.where(better, 1.0, damping / 2)
        norm = jnp.where(better, candidate_norm, norm)
        # Done if the residual is rounding, or close to it after a step that did not improve, or if no step improves.
        done = (norm <= 2 * rounding) | ((damping < 1) & (norm <= 100 * rounding)) | (damping < 1e-4)
        return count + 1, x, direction, damping, norm, done

    def unfinished(state):
        return (state[0] < _MOST_ITERATIONS) & ~jnp.all(state[-1])

    # The paper's inverse, one step with -v, is the first guess.
    lanes = y.shape[1:]
    guess = step.reversed().apply(y)
    start = (0, y, y - guess, jnp.ones(lanes, y.dtype), jnp.full(lanes, jnp.inf, y.dtype), jnp.zeros(lanes, bool))
    _, x, _, _, norm, _ = lax.while_loop(unfinished, body, start)
    return jnp.where(norm <= 1e3 * rounding, x, jnp.nan)
