"""Determinants and inverses of many small matrices at once.

A cell of the flow needs the determinant of one r x r matrix per sample, with r small. Batched LAPACK calls
spend most of their time between matrices, so these routines work across the batch instead: closed forms up
to 3 x 3, elimination by halves up to 16 x 16, LAPACK beyond.

Matrices are laid out ``(r, r, *lanes)``: the batch, if there is one, comes last. Small ones may also come as
rows of entries, which spares XLA the work of taking them apart again.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

LARGEST_CLOSED = 3
_LARGEST_BY_HALVES = 16

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
    return _eliminate(matrix, invert=False)[:2]


@jax.custom_jvp
def _slog_det_and_inverse(matrix):
    return _eliminate(matrix, invert=True)


@_slog_det.defjvp
def _slog_det_jvp(primals, tangents):
    (sign, log_abs, _), (sign_change, change, _) = jax.jvp(_slog_det_and_inverse, primals, tangents)
    return (sign, log_abs), (sign_change, change)


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

    def lapack():
        m = jnp.moveaxis(matrix, (0, 1), (-2, -1))
        inv = jnp.moveaxis(jnp.linalg.inv(m), (-2, -1), (0, 1)) if invert else None
        return *jnp.linalg.slogdet(m), inv

    if len(matrix) > _LARGEST_BY_HALVES:
        return lapack()
    *result, safe = _by_halves(matrix, jnp.array(True), invert=invert)
    return lax.cond(safe, lambda: tuple(result), lapack)


def _by_halves(m: Float[Array, "n n *lanes"], safe: Bool[Array, ""], *, invert: bool):
    """Sign, log|det|, inverse (if asked for) and whether all went well, by block elimination without pivoting.

    The pivots of I + dt J are close to the identity unless a cell is close to a fold. Where a pivot block is
    nearly singular or an entry has grown, elimination ends and `safe` is False: the caller asks LAPACK.
    """
    if len(m) <= LARGEST_CLOSED:
        return _pivot(m, safe)
    half = len(m) // 2
    a, b, c, d = m[:half, :half], m[:half, half:], m[half:, :half], m[half:, half:]
    sign_a, log_a, inv_a, safe = _by_halves(a, safe, invert=True)
    right, left = _stage(safe, lambda: (_product(inv_a, b), _product(c, inv_a)), len(m))
    schur = _stage(safe, lambda: d - _product(c, right), len(m))
    sign_s, log_s, inv_s, safe = _by_halves(schur, safe, invert=invert)
    sign, log_abs = sign_a * sign_s, log_a + log_s
    if not invert:
        return sign, log_abs, None, safe
    corner = _stage(safe, lambda: _product(right, inv_s), len(m))

    def assemble():
        top = jnp.concatenate([inv_a + _product(corner, left), -corner], axis=1)
        return jnp.concatenate([top, jnp.concatenate([-_product(inv_s, left), inv_s], axis=1)], axis=0)

    return sign, log_abs, _stage(safe, assemble, len(m)), safe


def _pivot(m, safe):
    det, inv = _closed_det(m), _closed_inverse(m)
    safe = safe & jnp.all(jnp.abs(det) > 0.1) & jnp.all(jnp.abs(m) < 5)
    return jnp.sign(det), jnp.log(jnp.abs(det)), inv, safe


def _product(a, b):
    return sum(a[:, k, None] * b[None, k] for k in range(len(b)))


def _stage(safe, compute, size):
    """`compute()`; for larger matrices only where all is well so far, else zeros.

    The branch keeps XLA from fusing one stage of the elimination into each of its later uses, which would
    compute it many times over: it makes 16 x 16 matrices several times faster, and 8 x 8 ones no faster.
    """
    if size <= 8:
        return compute()
    shapes = jax.eval_shape(compute)
    return lax.cond(safe, compute, lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))
