"""Many points side by side, with the batch in the minor axis of memory.

The flow is written for one point, and `jax.vmap` batches it. But `vmap` carries a scan's state with the batch
in the *first* axis, and for points of few dimensions that is about half as fast as the batch in the *last*.
The mathematics in `ddnf.flow` therefore allows trailing axes, lanes, and `over_lanes` sends a direct `vmap`
of the flow through them.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, PyTree


def over_lanes(function: Callable, tree: PyTree, *points: Array | None, chunk: int) -> PyTree:
    """``function(tree, *points)``; under a direct `vmap` over the points, with lanes for the batch.

    `function` must take trailing lanes in each point and return them in each output. Where `vmap` is not the
    innermost transformation (``vmap(grad(...))``, or a `jit` in between), or where `tree` is batched too,
    the ordinary batching takes over: the result is the same.

    No more than `chunk` points are computed side by side: what they need should stay in the caches. And iterations last
    as long as the slowest of the points.
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
        tree_batched, points_batched = batched
        if any(jax.tree.leaves(tree_batched)):
            axes = jax.tree.map(lambda b: 0 if b else None, (tree_batched, points_batched))
            out = jax.vmap(lambda a, p: function(eqx.combine(a, static), *p), in_axes=axes)(arrays, points)
        else:
            lanes = jax.tree.map(_to_lane, points, points_batched)
            widest = jnp.broadcast_shapes(*(p.shape[1:] for p in jax.tree.leaves(lanes)))
            lanes = jax.tree.map(lambda p: jnp.broadcast_to(p, p.shape[:1] + widest), lanes)
            # Another vmap may be around this one, which then comes first.
            out = _in_chunks(
                lambda lanes: over_lanes(function, eqx.combine(arrays, static), *lanes, chunk=chunk), lanes, chunk
            )
            out = jax.tree.map(lambda y: jnp.moveaxis(y, -1, 0), out)
        return out, jax.tree.map(lambda _: True, out)

    return call(arrays, points)


def _in_chunks(function: Callable, lanes: PyTree, chunk: int) -> PyTree:
    """``function(lanes)``, at most `chunk` of the last axis at a time."""
    size = jax.tree.leaves(lanes)[0].shape[-1]
    if size <= chunk:
        return function(lanes)
    count = -(-size // chunk)
    width = -(-size // count)

    def split(p):
        padded = jnp.concatenate([p, jnp.repeat(p[..., -1:], count * width - size, axis=-1)], axis=-1)
        return jnp.moveaxis(padded.reshape(*p.shape[:-1], count, width), -2, 0)

    def join(y):
        y = jnp.moveaxis(y, 0, -2)
        return y.reshape(*y.shape[:-2], count * width)[..., :size]

    return jax.tree.map(join, lax.map(function, jax.tree.map(split, lanes)))


def _vmap_is_innermost() -> bool:
    # JAX has no public way to ask. Should the private one go away, ordinary batching serves all cases.
    try:
        from jax._src.core import trace_ctx

        return type(trace_ctx.trace).__name__ == "BatchTrace"
    except (ImportError, AttributeError):
        return False


def _to_lane(point: Array, batched: bool) -> Array:
    return jnp.moveaxis(point, 0, -1) if batched else point[..., None]
