"""Is this map a diffeomorphism? Gives a proof if possible, and numerical evidence otherwise."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ddnf.flow.bijection import DDNF
from ddnf.flow.integrate import scan_blocks
from ddnf.system.compiling import quick_jit

Verdict = Literal["proved diffeomorphism", "no fold seen on these points", "folds", "not known"]


class Certificate(eqx.Module):
    """What is known of a flow's invertibility.

    Attributes:
        verdict: "proved diffeomorphism" (every step is the identity plus a contraction, for all points), "no fold
            seen on these points" (all cell determinants there are positive, and the exact inverse of each cell returns
            to its point), "folds" (one of these fails), or "not known" (no proof, and no points).
        min_determinant: the smallest determinant of a cell on the points; NaN without points.
        folded_share: the share of the points' cells whose determinant is not positive.
        round_trip: the largest distance between a point and its image under a cell followed by the cell's exact
            inverse; NaN if no inverse was found, or without points.
        lipschitz: for each block, a bound on the Lipschitz constant of (step - identity); below 1 proves it.
    """

    verdict: Verdict
    min_determinant: float
    folded_share: float
    round_trip: float
    lipschitz: np.ndarray

    def __str__(self):
        return (
            f"{self.verdict}: smallest cell determinant {self.min_determinant:.4g}, "
            f"folded cells {self.folded_share:.2%}, inverse misses by {self.round_trip:.2g}, "
            f"Lipschitz bound of the steps {self.lipschitz.max():.4g}"
        )


def certify(
    flow: DDNF, x: Float[Array, "n dim"] | None = None, condition: Float[Array, "..."] | None = None
) -> Certificate:
    """Checks whether a flow is a diffeomorphism: proved, not contradicted at the points, or refuted.

    The proof is the bound dt * prod |W_i|_2 * prod (steepest slope) < 1 in each block (or its analogue for midpoint
    and rk4). It holds for all points; with a condition, it holds for the given conditions.

    Args:
        flow: the flow.
        x: points, one for each row, at which the determinant of every cell is computed.
        condition: one condition, or one for each row.

    Example:
        >>> import jax.random as jr
        >>> flow = DDNF(jr.key(0), 2, output_scale=0.01)
        >>> certify(flow, jr.normal(jr.key(1), (100, 2))).verdict
        'proved diffeomorphism'
    """
    _check(flow, x, condition)
    lipschitz = np.asarray(_lipschitz(flow, condition))
    proved = lipschitz.max() < 1
    if x is None:
        nan = float("nan")
        return Certificate("proved diffeomorphism" if proved else "not known", nan, nan, nan, lipschitz)
    dets, misses = (np.asarray(a).ravel() for a in _cells(flow, x, condition))
    # If two points have the same image, the map folds somewhere between them. NaN, from a determinant or from an
    # inverse that was not found, also counts as a failure.
    folded = ~(dets > 0)
    missed = ~(misses < np.sqrt(np.finfo(misses.dtype).eps) * (1 + np.abs(x).max()))
    if folded.any() or missed.any():
        verdict = "folds"
    else:
        verdict = "proved diffeomorphism" if proved else "no fold seen on these points"
    return Certificate(verdict, float(dets.min()), float(folded.mean()), float(misses.max()), lipschitz)


def compile_certificate(flow: DDNF, x: Float[Array, "n dim"]) -> None:
    """Compiles the programs of `certify` without running them, for a flow without condition."""
    for lowered in (_lipschitz.lower(flow, None), _cells.lower(flow, x, None)):
        lowered.compile()


@quick_jit
def _lipschitz(flow: DDNF, condition) -> Float[Array, " K"]:
    lanes = condition if condition is None or condition.ndim == 1 else condition.T
    slopes = eqx.filter_vmap(lambda field: jnp.max(field.lipschitz()), axis_size=flow.blocks)(flow.bind(lanes))
    return flow.method.expansion(flow.dt * slopes)


@quick_jit
def _cells(flow: DDNF, x, condition) -> tuple[Float[Array, "n K T"], Float[Array, "n K T"]]:
    """The determinant of every cell on the path of every point, and by how much its inverse misses the point."""

    def point(x, condition):
        def block(z, field, _):
            step = field.step(flow.method, flow.dt)

            def cell(z, _):
                end, sign, log_abs = step.apply_and_slog_det(z)
                back = step.inverse(end)
                return end, (sign * jnp.exp(log_abs), jnp.max(jnp.abs(back - z)))

            return lax.scan(cell, z, length=flow.steps)

        return scan_blocks(block, flow.bind(condition), x, flow.blocks)[1]

    return jax.vmap(point, in_axes=(0, 0 if condition is not None and condition.ndim == 2 else None))(x, condition)


def _check(flow, x, condition):
    if not all(np.isfinite(a).all() for a in jax.tree.leaves(eqx.filter(flow, eqx.is_inexact_array))):
        raise ValueError("Expected finite weights; got NaN or infinity in the flow.")
    if x is not None and (x.ndim != 2 or x.shape[1:] != flow.shape):
        raise ValueError(f"Expected points of shape (n, {flow.shape[0]}); got {x.shape}.")
    if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"Expected floating-point points; got {x.dtype}.")
    if flow.cond_shape is not None:
        if condition is None or condition.shape[-1:] != flow.cond_shape or condition.ndim > 2:
            got = None if condition is None else condition.shape
            raise ValueError(f"Expected conditions of shape (n, {flow.cond_shape[0]}); got {got}.")
        if condition.ndim == 2 and x is not None and len(condition) != len(x):
            raise ValueError(f"Expected one condition for each of {len(x)} points; got {len(condition)}.")
