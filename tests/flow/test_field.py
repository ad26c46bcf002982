"""The velocity field: its Jacobian's factors, activations, contexts, and Lipschitz bound."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf import MLPField
from ddnf.flow.activation import ACTIVATIONS
from ddnf.flow.layer import spectral_norm

SHAPES = [(2, (16, 16)), (3, (2, 2)), (1, (4,)), (5, (7, 3, 6)), (20, (18, 19)), (4, (8, 2, 8, 3))]


@pytest.mark.parametrize(("dim", "hidden"), SHAPES)
@pytest.mark.parametrize("context", [{}, {"condition_dim": 3}, {"condition_dim": 3, "context_rank": 2}], ids=str)
def test_factors_and_core(dim, hidden, context):
    z = jr.normal(jr.key(1), (dim,))
    condition = jr.normal(jr.key(2), (3,)) if context else None

    @jax.jit
    def run(z, condition):
        field = MLPField(jr.key(0), dim, hidden=hidden, output_scale=1.0, **context)
        bound = field.bind(condition)
        core = jnp.stack(list(bound.linearize(z).core()), axis=1)
        return jax.jacobian(field)(z, condition), *field.jacobian_factors(z, condition), core, bound.lipschitz()

    jacobian, a, b, core, lipschitz = map(np.asarray, run(z, condition))
    assert a.shape[1] == b.shape[0] == min(dim, *hidden)
    assert_allclose(a @ b, jacobian, atol=1e-12)
    assert_allclose(core, b @ a, atol=1e-12)
    assert np.linalg.norm(jacobian, 2) <= lipschitz * (1 + 1e-12)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_are_derivatives_within_their_bound(name):
    activation, steepest = ACTIVATIONS[name]
    a = jnp.linspace(-20, 20, 40_001)
    found, slope = jax.jit(lambda a: (activation(a)[1], jax.vmap(jax.grad(lambda a: activation(a)[0]))(a)))(a)
    assert_allclose(found, slope, atol=1e-12)
    assert slope.max() <= steepest < slope.max() + 2e-4


def test_spectral_norm_and_its_gradient():
    matrix = jr.normal(jr.key(0), (5, 3))
    u, s, vt = np.linalg.svd(matrix)
    assert_allclose(spectral_norm(matrix), s[0])
    assert_allclose(jax.grad(spectral_norm)(matrix), np.outer(u[:, 0], vt[0]), atol=1e-12)
    zero = jnp.zeros((2, 2))
    assert spectral_norm(zero) == 0
    assert np.isfinite(jax.grad(spectral_norm)(zero)).all()


def test_lanes_are_points_side_by_side():
    field = MLPField(jr.key(0), 3, condition_dim=2, context_rank=1, output_scale=1.0)
    z, condition = jr.normal(jr.key(1), (3, 4, 5)), jr.normal(jr.key(2), (2, 4, 5))
    lanes = field(z, condition)
    assert_allclose(lanes[:, 1, 2], field(z[:, 1, 2], condition[:, 1, 2]), atol=1e-12)
