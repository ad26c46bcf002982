"""Small determinants and inverses against LAPACK."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf.flow import linalg

# Every way that a matrix may be eliminated: closed, one block, unrolled, in a loop, LAPACK.
SIZES = [1, 2, 3, 4, 5, 7, 8, 11, 16, 17, 65]
KINDS = ["near identity", "any", "badly conditioned", "nearly singular", "zero pivot"]


@jax.value_and_grad
def log_abs_det(m):
    return linalg.slog_det(m)[1]


# `vmap` inside and outside of `jit`; made here so that a size is compiled once for all kinds of matrices.
DETERMINANTS = jax.jit(jax.vmap(linalg.slog_det)), jax.vmap(jax.jit(linalg.slog_det))
GRADIENTS = jax.jit(jax.vmap(log_abs_det)), jax.vmap(jax.jit(log_abs_det))
INVERSE = jax.vmap(jax.jit(linalg.inverse))


def matrices(n, kind, dtype=float, count=3):
    rng = np.random.default_rng(n)
    noise = rng.normal(size=(count, n, n)) / np.sqrt(n)
    if kind == "near identity":
        return (np.eye(n) + 0.3 * noise).astype(dtype)
    if kind == "any":
        return noise.astype(dtype)
    if kind == "zero pivot":
        m = np.roll(np.eye(n) + 0.1 * noise, 1, axis=1)
        m[:, 0, 0] = 0.0 if n > 1 else 1.0
        return m.astype(dtype)
    u, _, vt = np.linalg.svd(noise)
    smallest = 1e-4 if kind == "badly conditioned" else 1e-6
    return ((u * np.geomspace(1, smallest, n) if n > 1 else u) @ vt).astype(dtype)


def check(n, kind, dtype):
    """Value, inverse and gradient, `vmap` inside and outside of `jit`, against LAPACK in double precision."""
    m = matrices(n, kind, dtype)
    exact = m.astype(float)
    sign, log_abs = np.linalg.slogdet(exact)
    inverse = np.linalg.inv(exact)
    # Errors are relative to the condition number: that is what LAPACK promises too.
    condition = np.linalg.cond(exact).max()
    tolerance = 50 * n * np.finfo(dtype).eps * condition
    for batched in DETERMINANTS:
        found_sign, found = batched(m)
        assert_allclose(found_sign, sign)
        assert_allclose(found, log_abs, atol=tolerance, rtol=1e-6 if dtype == np.float32 else 1e-12)
    for batched in GRADIENTS:
        gradient = batched(m)[1]
        assert np.abs(gradient - inverse.swapaxes(1, 2)).max() <= tolerance * np.abs(inverse).max()
    found = INVERSE(m)
    assert np.abs(found - inverse).max() <= tolerance * np.abs(inverse).max()


@pytest.mark.parametrize(("n", "dtype"), [*((n, np.float64) for n in SIZES), (3, np.float32), (16, np.float32)])
def test_against_lapack(n, dtype):
    """Far from the identity elimination without pivots is not safe: the fallback must give the same."""
    for kind in KINDS:
        check(n, kind, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, 66))
def test_every_size_against_lapack(n):
    for kind in KINDS:
        for dtype in (np.float32, np.float64):
            check(n, kind, dtype)


@pytest.mark.parametrize("n", [2, 5, 12, 17])
def test_second_derivatives(n):
    m = jnp.asarray(matrices(n, "near identity")[0])
    direction = jr.normal(jr.key(1), (n, n))

    def second(f):
        return jax.jit(jax.grad(lambda m: jnp.sum(direction * jax.grad(f)(m))))(m)

    ours, theirs = (lambda m: linalg.slog_det(m)[1]), (lambda m: jnp.linalg.slogdet(m)[1])
    assert_allclose(second(ours), second(theirs), atol=1e-8)
    _, tangent = jax.jvp(linalg.inverse, (m,), (direction,))
    inverse = jnp.linalg.inv(m)
    assert_allclose(tangent, -inverse @ direction @ inverse, atol=1e-10)


@pytest.mark.parametrize("n", [2, 5, 12])
def test_lanes_and_vmap_agree(n):
    m = jnp.moveaxis(jnp.asarray(matrices(n, "near identity", count=6)), 0, -1).reshape(n, n, 2, 3)
    lanes = linalg.slog_det(m)[1]
    mapped = jax.vmap(jax.vmap(lambda m: linalg.slog_det(m)[1], -1), -1)(m)
    assert_allclose(mapped.T, lanes, atol=1e-12)
