"""Determinants and inverses of many small matrices at once.

A cell of the flow needs the determinant of one r x r matrix for each point, with r small. Batched LAPACK calls spend
most of their time in overhead between matrices. These routines work across the batch instead: closed forms up to 3 x 3,
block elimination without pivoting up to 64 x 64 (with a pivoted fallback), and LAPACK beyond.

Matrices are laid out as ``(r, r, *lanes)``, with the batch last. Small matrices may also be given as rows of entries,
so that XLA need not slice them. `vmap` in any order with `jit` and `grad` adds a lane; see `_eliminate_lanes`.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float

LARGEST_CLOSED = 3
# Determinants up to this size are eliminated in unrolled code, larger ones and all inverses in a loop.
_LARGEST_UNROLLED = 16
_LARGEST_ELIMINATED = 64
# How many rows are eliminated at once.
_PIVOTS = 4

Rows = Sequence[Sequence[Array]]


def slog_det(matrix: Float[Array, "r r *lanes"] | Rows) -> tuple[Float[Array, "*lanes"], Float[Array, "*lanes"]]:
    """Sign and logarithm of the absolute determinant.

    Example:
        >>> import jax.numpy as jnp
        >>> sign, log_abs = slog_det(jnp.array([[0.0, 2.0], [1.0, 0.0]]))
        >>> float(sign), round(float(log_abs), 6)
        (-1.0, 0.693147)
    """
    if len(matrix) <= LARGEST_CLOSED:
        det = _closed_det(matrix)
        return lax.stop_gradient(jnp.sign(det)), jnp.log(jnp.abs(det))
    return _slog_det(_as_array(matrix))


def inverse(matrix: Float[Array, "r r *lanes"] | Rows) -> Float[Array, "r r *lanes"]:
    """Inverse of each matrix.

    Example:
        >>> import jax.numpy as jnp
        >>> inverse(jnp.array([[2.0, 1.0], [1.0, 1.0]])).tolist()
        [[1.0, -1.0], [-1.0, 2.0]]
    """
    if len(matrix) <= LARGEST_CLOSED:
        return _closed_inverse(matrix)
    return _slog_det_and_inverse(_as_array(matrix))[2]


def _as_array(matrix):
    return matrix if isinstance(matrix, Array) else jnp.stack([jnp.stack(list(row)) for row in matrix])


def _minor(m, i, j):
    return [[m[a][b] for b in range(len(m)) if b != j] for a in range(len(m)) if a != i]


def _closed_det(m):
    if len(m) == 1:
        return m[0][0]
    return sum((-1) ** j * m[0][j] * _closed_det(_minor(m, 0, j)) for j in range(len(m)))


def _closed_inverse(m):
    if len(m) == 1:
        return 1 / _as_array(m)
    n = len(m)
    adjugate = [[(-1) ** (i + j) * _closed_det(_minor(m, j, i)) for j in range(n)] for i in range(n)]
    return _as_array(adjugate) / _closed_det(m)


@jax.custom_jvp
def _slog_det(matrix):
    return _eliminate_lanes(matrix, invert=False)[:2]


@jax.custom_jvp
def _slog_det_and_inverse(matrix):
    return _eliminate_lanes(matrix, invert=True)


def _eliminate_lanes(matrix, *, invert):
    """`_eliminate`, in which every axis that `vmap` batches becomes a lane.

    Under ordinary batching, all branches of `_eliminate` would be computed, with a poor memory layout of its products.
    This rule applies below all other transformations, because derivatives are defined above it.
    """

    @custom_vmap
    def eliminate(matrix):
        return _eliminate(matrix, invert=invert)

    @eliminate.def_vmap
    def rule(size, batched, matrix):
        result = _eliminate_lanes(jnp.moveaxis(matrix, 0, -1), invert=invert)
        result = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, -1, 0), result)
        return result, jax.tree.map(lambda _: True, result)

    return eliminate(matrix)


@_slog_det.defjvp
def _slog_det_jvp(primals, tangents):
    # The value is computed without the inverse. If the backward pass recomputes a cell, the forward part only needs the
    # value, and the backward part only the inverse.
    sign, log_abs = _slog_det(*primals)
    _, (_, change, _) = jax.jvp(_slog_det_and_inverse, primals, tangents)
    return (sign, log_abs), (jnp.zeros_like(sign), change)


@_slog_det_and_inverse.defjvp
def _slog_det_and_inverse_jvp(primals, tangents):
    # d log|det M| = tr(M^-1 dM), d M^-1 = -M^-1 dM M^-1
    (matrix,), (tangent,) = primals, tangents
    sign, log_abs, inv = _slog_det_and_inverse(matrix)
    change = jnp.sum(jnp.swapaxes(inv, 0, 1) * tangent, axis=(0, 1))
    inv_change = -jnp.einsum("ij...,jk...,kl...->il...", inv, tangent, inv)
    return (sign, log_abs, inv), (jnp.zeros_like(sign), change, inv_change)


@partial(jax.jit, static_argnames="invert")
def _eliminate(matrix, *, invert):
    """Sign, log|det| and inverse (None unless asked for)."""
    if len(matrix) > _LARGEST_ELIMINATED:
        m = jnp.moveaxis(matrix, (0, 1), (-2, -1))
        inv = jnp.moveaxis(jnp.linalg.inv(m), (-2, -1), (0, 1)) if invert else None
        return *jnp.linalg.slogdet(m), inv
    if len(matrix) <= _PIVOTS:
        *result, safe = _pivot_block(matrix, jnp.array(True))
    elif len(matrix) <= _LARGEST_UNROLLED and not invert:
        *result, safe = _by_shrinking(matrix)
    else:
        *result, safe = _by_sweeps(matrix, invert=invert)
    result = result if invert else [*result[:2], None]
    # Not by LAPACK, which wants each matrix in one piece and would change the layout of everything around it.
    return lax.cond(safe, lambda: tuple(result), lambda: _with_pivots(matrix, invert=invert))


def _with_pivots(m: Float[Array, "n n *lanes"], *, invert: bool):
    """Sign, log|det| and inverse by Gauss-Jordan elimination of [M, I] with partial pivoting: slow, and for any M."""
    n, lanes = len(m), m.shape[2:]
    eye = jnp.eye(n, dtype=m.dtype).reshape(n, n, *(1 for _ in lanes))
    rows = jnp.arange(n).reshape(n, *(1 for _ in lanes))

    def eliminate(k, state):
        both, sign, log_abs = state
        best = jnp.argmax(jnp.where(rows >= k, jnp.abs(both[:, k]), -1.0), axis=0)[None]
        pivot_row = jnp.take_along_axis(both, best[:, None], axis=0)
        both = jnp.where((rows == best)[:, None], both[k][None], both)
        pivot = pivot_row[0, k]
        pivot_row = pivot_row / jnp.where(pivot == 0, 1.0, pivot)
        both = jnp.where((rows == k)[:, None], pivot_row, both - both[:, k, None] * pivot_row)
        sign = sign * jnp.sign(pivot) * jnp.where(best[0] == k, 1.0, -1.0)
        return both, sign, log_abs + jnp.log(jnp.abs(pivot))

    both = jnp.concatenate([m, jnp.broadcast_to(eye, m.shape)], axis=1)
    start = both, jnp.ones(lanes, m.dtype), jnp.zeros(lanes, m.dtype)
    both, sign, log_abs = lax.fori_loop(0, n, eliminate, start)
    inv = jnp.where(jnp.isfinite(log_abs), both[:, n:], jnp.inf) if invert else None
    return sign, log_abs, inv


def _by_shrinking(m: Float[Array, "n n *lanes"]):
    """Sign, log|det|, None, and whether all pivots were safe, by block elimination without pivoting.

    The pivots of I + dt J are close to the identity unless a cell is close to a fold. If a pivot block is nearly
    singular or an entry has grown, `safe` is False, and the caller uses pivoting.
    """
    safe = jnp.array(True)
    sign, log_abs = jnp.ones(m.shape[2:], m.dtype), jnp.zeros(m.shape[2:], m.dtype)
    while len(m) > _PIVOTS:
        pivot_sign, pivot_log, inv, safe = _stage(safe, _first_pivots, m, safe)
        right = _stage(safe, _eliminated, m, inv)
        m = _stage(safe, _schur, m, right)
        sign, log_abs = sign * pivot_sign, log_abs + pivot_log
    last_sign, last_log, _, safe = _pivot_block(m, safe)
    return sign * last_sign, log_abs + last_log, None, safe


def _by_sweeps(m: Float[Array, "n n *lanes"], *, invert: bool):
    """As `_by_shrinking`, with the inverse, by Gauss-Jordan sweeps in a loop that compiles once for any size.

    With C the columns of the pivots, R their rows, D where these meet and E the same columns of the identity, a sweep
    is one update of the matrix in place, M - (C - E) D^-1 (R + E^T), and M is the inverse after all rows were swept.
    The determinant omits E, so that swept rows become zero.
    """
    n, lanes = len(m), m.shape[2:]
    state = _padded(m), jnp.ones(lanes, m.dtype), jnp.zeros(lanes, m.dtype), jnp.array(True)
    count = len(state[0]) // _PIVOTS
    if invert:
        inv, sign, log_abs, safe = lax.fori_loop(0, count, partial(_sweep, invert=True), state)
        return sign, log_abs, inv[:n, :n], safe
    # Half of the rows, then the other half without those that are done.
    half = count // 2
    m, *others = lax.fori_loop(0, half, partial(_sweep, invert=False), state)
    done = half * _PIVOTS
    _, *result, safe = lax.fori_loop(0, count - half, partial(_sweep, invert=False), (m[done:, done:], *others))
    return *result, None, safe


def _sweep(number, state, *, invert):
    m, sign, log_abs, safe = state
    cross = partial(_cross, first=number * _PIVOTS, invert=invert)
    columns, rows, (pivot_sign, pivot_log, inv, safe) = _stage(safe, cross, m, safe)
    columns = _stage(safe, _product, columns, inv)
    return m - _product(columns, rows), sign * pivot_sign, log_abs + pivot_log, safe


def _cross(m, safe, *, first, invert):
    """C - E and R + E^T (C and R for the determinant), and the sign, log|det| and inverse of D."""
    rows, columns = (lax.dynamic_slice_in_dim(m, first, _PIVOTS, axis) for axis in (0, 1))
    pivots = _pivot_block(lax.dynamic_slice_in_dim(rows, first, _PIVOTS, 1), safe)
    if not invert:
        return columns, rows, pivots
    unit = jnp.arange(len(m))[:, None] == first + jnp.arange(_PIVOTS)
    unit = unit.astype(m.dtype).reshape(unit.shape + (1,) * (m.ndim - 2))
    return columns - unit, rows + jnp.swapaxes(unit, 0, 1), pivots


def _padded(m):
    """The matrix with ones added on the diagonal, so that sweeps come out even."""
    n, more = len(m), -len(m) % _PIVOTS
    ones = jnp.eye(n + more, dtype=m.dtype)[:, n:]
    ones = jnp.broadcast_to(ones.reshape(ones.shape + (1,) * (m.ndim - 2)), (n + more, more, *m.shape[2:]))
    return jnp.concatenate([jnp.concatenate([m, jnp.swapaxes(ones[:n], 0, 1)]), ones], axis=1)


def _first_pivots(m, safe):
    """Sign, log|det| and inverse of the first few rows and columns, and whether all pivots so far were safe."""
    return _pivot_block(m[:_PIVOTS, :_PIVOTS], safe)


def _eliminated(m, inv):
    """The first rows, times the inverse of their pivots."""
    return _product(inv, m[:_PIVOTS, _PIVOTS:])


def _schur(m, right):
    """What is left of a matrix when its first rows are eliminated."""
    return m[_PIVOTS:, _PIVOTS:] - _product(m[_PIVOTS:, :_PIVOTS], right)


def _pivot_block(m: Float[Array, "n n *lanes"], safe: Bool[Array, ""]):
    """Sign, log|det| and inverse of a few rows and columns, and whether all pivots so far were safe."""
    if len(m) <= LARGEST_CLOSED:
        det, inv = _closed_det(m), _closed_inverse(m)
        safe = safe & jnp.all(jnp.abs(det) > 0.1) & jnp.all(jnp.abs(m) < 5)
        return jnp.sign(det), jnp.log(jnp.abs(det)), inv, safe
    half = len(m) // 2
    a, b, c, d = m[:half, :half], m[:half, half:], m[half:, :half], m[half:, half:]
    sign_a, log_a, inv_a, safe = _pivot_block(a, safe)
    right, left = _product(inv_a, b), _product(c, inv_a)
    sign_s, log_s, inv_s, safe = _pivot_block(d - _product(c, right), safe)
    corner = _product(right, inv_s)
    top = jnp.concatenate([inv_a + _product(corner, left), -corner], axis=1)
    bottom = jnp.concatenate([-_product(inv_s, left), inv_s], axis=1)
    return sign_a * sign_s, log_a + log_s, jnp.concatenate([top, bottom]), safe


def _product(a, b):
    return sum(a[:, k, None] * b[None, k] for k in range(len(b)))


def _stage(safe, compute, *arguments):
    """`compute(*arguments)` if all previous stages succeeded, otherwise zeros.

    The branch keeps XLA from fusing one stage of the elimination into each of its later uses, which would recompute it
    many times. This makes large matrices several times faster, and does not affect 8 x 8 matrices.
    """

    def zeros(*arguments):
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(compute, *arguments))

    return lax.cond(safe, compute, zeros, *arguments)
