"""Regularizers against values known in closed form."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf import DDNF, geodesic, inverse_consistency, sobolev

FLOW = DDNF(jr.key(0), 3, blocks=2, steps=4, hidden=(4,), output_scale=1.0)
X = jnp.array([0.3, -0.2, 0.8])


def test_geodesic_is_the_time_integral_of_the_squared_speed():
    _, path = FLOW.path(X)
    expected = sum(jnp.sum(v**2) / 4 for v in path.velocities.reshape(-1, 3))
    assert_allclose(geodesic(path), expected)


def test_sobolev_without_laplacian_is_geodesic():
    _, path = FLOW.path(X)
    assert_allclose(jax.jit(lambda x: sobolev(FLOW, x, alpha=0.0, power=2))(X), geodesic(path))
    assert_allclose(jax.jit(lambda x: sobolev(FLOW, x, alpha=-0.7, power=0))(X), geodesic(path))


@pytest.mark.parametrize("power", [1, 2, 3])
def test_sobolev_of_an_eigenfunction(power):
    """Laplacian sin(w . z) = -|w|^2 sin(w . z), so L multiplies it by (1 - alpha |w|^2)^c."""
    w = jnp.array([1.0, 2.0])
    flow = DDNF(
        jr.key(0), 2, blocks=1, steps=1, field=lambda key: lambda z, condition: jnp.sin(w @ z) * jnp.array([1.0, 0.5])
    )
    z = jnp.array([0.3, 0.1])
    v = jnp.sin(w @ z) * jnp.array([1.0, 0.5])
    assert_allclose(sobolev(flow, z, alpha=-0.2, power=power), v @ v * (1 + 0.2 * 5) ** power, rtol=1e-10)


def test_sobolev_by_probes_is_unbiased():
    """Also for power 2, where the probes of the two Laplacians must be independent."""
    exact = jax.jit(lambda x: sobolev(FLOW, x, alpha=-0.1, power=2))(X)
    estimate = jax.jit(jax.vmap(lambda key: sobolev(FLOW, X, alpha=-0.1, power=2, probes=2, key=key)))
    samples = estimate(jr.split(jr.key(1), 4000))
    assert samples.std() > 1e-4
    assert abs(samples.mean() - exact) < 4 * samples.std() / np.sqrt(4000)


def test_inverse_consistency_is_the_gap_left_by_reverse():
    back, _ = FLOW.reverse_and_log_det(FLOW.transform(X))
    assert_allclose(inverse_consistency(FLOW, X), jnp.linalg.norm(back - X))
    still = DDNF(jr.key(0), 2, field=lambda key: lambda z, condition: 0 * z)
    assert inverse_consistency(still, X[:2]) == 0
    assert np.isfinite(jax.grad(lambda x: inverse_consistency(still, x))(X[:2])).all()


@pytest.mark.parametrize(
    "regularizer",
    [
        lambda flow: geodesic(flow.path(X)[1]),
        lambda flow: sobolev(flow, X, alpha=-0.1, power=1),
        lambda flow: inverse_consistency(flow, X),
    ],
    ids=["geodesic", "sobolev", "inverse consistency"],
)
def test_gradients_are_finite_and_reach_every_parameter(regularizer):
    gradient = eqx.filter_jit(eqx.filter_grad(regularizer))(FLOW)
    for leaf in jax.tree.leaves(gradient):
        assert np.isfinite(leaf).all() and (leaf != 0).any()
