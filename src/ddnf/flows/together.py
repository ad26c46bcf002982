"""A batch as one: what is computed for one point may be told that `vmap` asks for many."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, PyTree


def together(function: Callable, tree: PyTree, *points: Array | None) -> PyTree:
    """``function(tree, *points)``; under a direct `vmap` over the points, one call with all of them.

    `function` must take points with leading axes, and give its outputs these axes. Where `vmap` is not the innermost
    transformation, or `tree` is batched too, each point is computed by itself, as `vmap` always does.

    Example:
        >>> mean = lambda tree, x: x - jnp.mean(x)
        >>> jax.vmap(lambda x: together(mean, None, x))(jnp.array([1.0, 3.0])).tolist()
        [-1.0, 1.0]
    """
    # `custom_vmap` can be differentiated in reverse from outside only, hence the question.
    if not _vmap_is_innermost():
        return function(tree, *points)
    arrays, static = eqx.partition(tree, eqx.is_array)

    @custom_vmap
    def call(arrays, points):
        return function(eqx.combine(arrays, static), *points)

    @call.def_vmap
    def rule(size, batched, arrays, points):
        if any(jax.tree.leaves(batched[0])):
            axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
            out = jax.vmap(lambda a, p: function(eqx.combine(a, static), *p), in_axes=axes)(arrays, points)
        else:
            many = jax.tree.map(lambda p, is_batched: p if is_batched else _repeated(p, size), points, batched[1])
            # Another vmap may be around this one, which then comes first.
            out = together(function, eqx.combine(arrays, static), *many)
        return out, jax.tree.map(lambda _: True, out)

    return call(arrays, points)


def _repeated(point: Array, size: int) -> Array:
    return jnp.broadcast_to(point, (size, *point.shape))


def _vmap_is_innermost() -> bool:
    # JAX has no public way to ask. Should the private one go away, ordinary batching serves all cases.
    try:
        from jax._src.core import trace_ctx

        return type(trace_ctx.trace).__name__ == "BatchTrace"
    except (ImportError, AttributeError):
        return False
