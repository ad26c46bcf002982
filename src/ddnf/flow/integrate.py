"""The passes of a flow through its cells: forward, with score, path, exact inverse, and the paper's reverse.

Each pass scans over the K bound fields of a flow and, within each, over its T steps. Points are ``(dim, *lanes)``.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ddnf.flow.newton import SOLUTION, warn_unless

Moved = tuple[Float[Array, "dim *lanes"], Float[Array, "*lanes"]]


def forward(flow: Any, bound: Any, x: Float[Array, "dim *lanes"]) -> Moved:
    """The end point and the log-determinant by the flow's rule."""

    def cell(step, carry, number):
        z, log_det = carry
        z, change = flow.log_det.apply(step, z, cell=number)
        return z, log_det + change

    return _scan(flow, bound, cell, (x, _zero(x)))


def points(flow: Any, bound: Any, x: Float[Array, "dim *lanes"]) -> Float[Array, "dim *lanes"]:
    """The end point."""
    return _scan(flow, bound, lambda step, z, _: step.apply(z), x)


def inverse(flow: Any, bound: Any, y: Float[Array, "dim *lanes"]) -> Moved:
    """The exact inverse; NaN and a warning if there is none."""

    def cell(step, carry, number):
        z, log_det = carry
        z = step.inverse(z)
        _, change = flow.log_det.apply(step, z, cell=number)
        return z, log_det - change

    x, log_det = _scan(flow, bound, cell, (y, _zero(y)), reverse=True)
    warn_unless(jnp.all(jnp.isfinite(x) | ~jnp.isfinite(y)))
    return x, log_det


def reverse(flow: Any, bound: Any, y: Float[Array, "dim *lanes"]) -> Moved:
    """The paper's inverse: the flow with -v, and its own log-determinant."""

    def cell(step, carry, number):
        z, log_det = carry
        z, change = flow.log_det.apply(step.reversed(), z, cell=number)
        return z, log_det + change

    return _scan(flow, bound, cell, (y, _zero(y)), reverse=True)


def with_score(
    flow: Any, bound: Any, x: Float[Array, "dim *lanes"], score: Float[Array, "dim *lanes"]
) -> tuple[Float[Array, "dim *lanes"], Float[Array, "*lanes"], Float[Array, "dim *lanes"]]:
    """The end point, the exact log-determinant, and the transformed score, J^-T (score - grad log det)."""

    def cell(step, carry, _):
        z, score, log_det = carry

        def end_and_change(z):
            end, _, change = step.apply_and_slog_det(z)
            return end, change

        (end, change), pull = jax.vjp(end_and_change, z)
        (gradient,) = pull((jnp.zeros_like(z), jnp.ones_like(change)))
        return end, step.at(z).solve_transposed(score - gradient), log_det + change

    y, score, log_det = _scan(flow, bound, cell, (x, score.astype(x.dtype), _zero(x)), recompute=False)
    return y, log_det, score


def path(flow: Any, bound: Any, x: Float[Array, " dim"]) -> tuple[Array, tuple[Array, Array, Array]]:
    """The end point, and for each cell its starting point, the velocity there and its log-determinant."""

    def block(z, field, index):
        step = field.step(flow.method, flow.dt)

        def cell(z, t):
            end, change = flow.log_det.apply(step, z, cell=index * flow.steps + t)
            return end, (z, field(z), change)

        return lax.scan(jax.checkpoint(cell, prevent_cse=False), z, jnp.arange(flow.steps))

    return scan_blocks(block, bound, x, flow.blocks)


def scan_blocks(block: Callable, bound: Any, carry: Any, count: int, *, reverse: bool = False) -> tuple[Any, Any]:
    """Scans ``block(carry, field, index)`` over a stack of bound fields."""
    arrays, static = eqx.partition(bound, eqx.is_array)

    def body(carry, indexed):
        index, arrays = indexed
        return block(carry, eqx.combine(arrays, static), index)

    return lax.scan(body, carry, (jnp.arange(count), arrays), reverse=reverse)


def _scan(flow, bound, cell: Callable, carry, *, reverse: bool = False, recompute: bool = True):
    """The carry after ``cell(step, carry, number)`` in every cell, with the backward pass that the flow specifies."""
    strategy = flow.recompute if recompute else "nothing"

    def block(carry, field, index):
        step = field.step(flow.method, flow.dt)

        def numbered(carry, t):
            number = index * flow.steps + (flow.steps - 1 - t if reverse else t)
            return cell(step, carry, number), None

        return _scan_cells(numbered, carry, flow.steps, strategy)

    if strategy == "segments":
        block = jax.checkpoint(block, prevent_cse=False)
    return scan_blocks(block, bound, carry, flow.blocks, reverse=reverse)[0]


def _scan_cells(cell, carry, count: int, strategy: str):
    if strategy == "nothing":
        return lax.scan(cell, carry, jnp.arange(count))
    policy = jax.checkpoint_policies.save_only_these_names(SOLUTION)
    cell = jax.checkpoint(cell, prevent_cse=False, policy=policy)
    return _scan_segments(cell, carry, jnp.arange(count), levels=2 if strategy == "segments" else 0)


def _scan_segments(cell, carry, numbers, *, levels: int):
    """A scan in nested segments, of which the backward pass only stores the start points."""
    length = round(len(numbers) ** (levels / (levels + 1)))
    if levels == 0 or len(numbers) <= 2 * length:
        return lax.scan(cell, carry, numbers)
    in_segments = len(numbers) // length * length

    def segment(carry, numbers):
        return _scan_segments(cell, carry, numbers, levels=levels - 1)

    segments = numbers[:in_segments].reshape(-1, length)
    carry, _ = lax.scan(jax.checkpoint(segment, prevent_cse=False), carry, segments)
    return segment(carry, numbers[in_segments:])


def _zero(x):
    return jnp.zeros(x.shape[1:], x.dtype)
