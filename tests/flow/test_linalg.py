"""Small determinants and inverses against LAPACK."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf.flow import linalg as small

SIZES = [1, 2, 3, 4, 5, 7, 8, 11, 16, 17, 65]


def matrices(n, *, near_identity, lanes=(6,)):
    noise = jr.normal(jr.key(n), (n, n, *lanes)) / np.sqrt(n)
    eye = jnp.eye(n).reshape(n, n, *[1] * len(lanes))
    return eye + 0.3 * noise if near_identity else noise


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("near_identity", [True, False], ids=["near identity", "any"])
def test_against_lapack(n, near_identity):
    """Far from the identity elimination without pivots is not safe: the fallback must give the same."""
    m = matrices(n, near_identity=near_identity)
    stacked = jnp.moveaxis(m, -1, 0)
    sign, log_abs = jax.jit(small.slog_det)(m)
    expected = jnp.linalg.slogdet(stacked)
    assert_allclose(sign, expected[0])
    assert_allclose(log_abs, expected[1], atol=1e-10)
    inverse = jax.jit(small.inverse)(m)
    assert_allclose(jnp.moveaxis(inverse, -1, 0), jnp.linalg.inv(stacked), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n", [3, 5, 12])
def test_zero_leading_pivot(n):
    """Well conditioned, but the first pivot is zero."""
    m = jnp.roll(matrices(n, near_identity=True, lanes=()), 1, axis=0)
    m = m.at[0, 0].set(0.0)
    assert_allclose(small.slog_det(m)[1], jnp.linalg.slogdet(m)[1], atol=1e-10)
    assert_allclose(small.inverse(m) @ m, jnp.eye(n), atol=1e-10)


@pytest.mark.parametrize("n", [2, 3, 5, 12, 17])
def test_derivatives(n):
    """First and second derivatives, forward and reverse, against those of LAPACK's."""
    m = matrices(n, near_identity=True, lanes=())
    direction = jr.normal(jr.key(1), (n, n))

    def second(f):
        return jax.jit(jax.grad(lambda m: jnp.sum(direction * jax.grad(f)(m))))(m)

    ours, theirs = (lambda m: small.slog_det(m)[1]), (lambda m: jnp.linalg.slogdet(m)[1])
    assert_allclose(jax.jit(jax.grad(ours))(m), jnp.linalg.inv(m).T, atol=1e-10)
    assert_allclose(second(ours), second(theirs), atol=1e-8)
    _, tangent = jax.jvp(small.inverse, (m,), (direction,))
    inverse = jnp.linalg.inv(m)
    assert_allclose(tangent, -inverse @ direction @ inverse, atol=1e-10)


@pytest.mark.parametrize("n", [2, 5, 12])
def test_lanes_and_vmap_agree(n):
    m = matrices(n, near_identity=True, lanes=(2, 3))
    lanes = small.slog_det(m)[1]
    mapped = jax.vmap(jax.vmap(lambda m: small.slog_det(m)[1], -1), -1)(m)
    assert_allclose(mapped.T, lanes, atol=1e-12)
