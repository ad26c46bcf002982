"""The root of an increasing function of one variable, to rounding, with implicit gradients."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_MAX_STEPS = 200


def increasing_root(
    function: Callable[[Array], Array], low: Float[Array, ""], high: Float[Array, ""]
) -> Float[Array, ""]:
    """The x with function(x) = 0, by Newton's method kept within a bracket by bisection.

    By the implicit function theorem dx = -df / f'(x), where df is the change of the function at x: gradients reach
    whatever the function closes over, and the iterations are not differentiated.

    Args:
        function: increasing and differentiable.
        low, high: initial bracket; widened if it does not contain the root.

    Example:
        >>> import jax
        >>> cube_root = lambda y: increasing_root(lambda x: x**3 - y, jnp.zeros(()), y)
        >>> round(float(cube_root(jnp.array(8.0))), 5), round(float(jax.grad(cube_root)(8.0)), 5)
        (2.0, 0.08333)
    """
    low, high = lax.stop_gradient(low), lax.stop_gradient(high)

    def solve(function, _):
        return _newton(function, *_bracket(function, low, high))

    return lax.custom_root(function, (low + high) / 2, solve, lambda linear, y: y / linear(jnp.ones_like(y)))


def _bracket(function, low, high):
    def body(state):
        low, high, width, _ = state
        below, above = function(low) <= 0, function(high) >= 0
        low, high = jnp.where(below, low, low - width), jnp.where(above, high, high + width)
        return low, high, 2 * width, below & above

    def unfinished(state):
        return ~state[3] & jnp.isfinite(state[2])

    low, high, _, _ = lax.while_loop(unfinished, body, (low, high, high - low + 1e-3, jnp.array(False)))
    return low, high


def _newton(function, low, high):
    # Smaller steps are rounding, if the function's terms are as large as its bracket.
    tolerance = jnp.finfo(low.dtype).eps * (high - low)

    def body(state):
        low, high, x, size, count = state
        value, slope = jax.jvp(function, (x,), (jnp.ones_like(x),))
        low, high = jnp.where(value <= 0, x, low), jnp.where(value >= 0, x, high)
        newton = x - value / slope
        # Newton's steps must halve, otherwise bisection takes over: this terminates for every function.
        is_good = (low < newton) & (newton < high) & (jnp.abs(newton - x) < size / 2)
        after = jnp.where(is_good, newton, (low + high) / 2)
        return low, high, after, jnp.abs(after - x), count + 1

    def unfinished(state):
        _, _, x, size, count = state
        return (size > tolerance + jnp.finfo(x.dtype).eps * jnp.abs(x)) & (count < _MAX_STEPS)

    return lax.while_loop(unfinished, body, (low, high, (low + high) / 2, high - low, 0))[2]
