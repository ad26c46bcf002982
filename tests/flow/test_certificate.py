"""The certificate's three verdicts, and the guarantee."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf import DDNF, certify, euler, midpoint, rk4

X = jr.normal(jr.key(1), (200, 2))


def linear_field(matrix):
    return lambda key: lambda z, condition: matrix @ z


def test_verdicts():
    calm = DDNF(jr.key(0), 2)
    wild = DDNF(jr.key(0), 2, blocks=2, steps=1, output_scale=20.0)
    assert certify(calm).verdict == certify(calm, X).verdict == "proved diffeomorphism"
    between = DDNF(jr.key(0), 2, blocks=2, steps=8, output_scale=4.0)
    assert certify(between, X).verdict == "no fold seen on these points"
    assert certify(between).verdict == "not known"
    assert certify(wild, X).verdict == "folds"
    assert "folds" in str(certify(wild, X))


def test_smallest_determinant_is_that_of_the_jacobians():
    flow = DDNF(jr.key(3), 2, blocks=2, steps=1, output_scale=3.0)

    def cells(x):
        _, path = flow.path(x)
        starts = path.points[:, 0]
        return jnp.stack(
            [
                jnp.linalg.det(jnp.eye(2) + jax.jacobian(jax.tree.map(lambda a, k=k: a[k], flow.fields))(starts[k]))
                for k in range(2)
            ]
        )

    dets = np.asarray(jax.jit(jax.vmap(cells))(X))
    certificate = certify(flow, X)
    assert_allclose(certificate.min_determinant, dets.min(), atol=1e-10)
    assert_allclose(certificate.folded_share, np.mean(dets <= 0))


def test_a_fold_between_the_points_is_noticed():
    """All determinants on the points are positive, but two of the points have one image."""
    flow = DDNF(jr.key(0), 1, blocks=1, steps=1, field=lambda key: lambda z, condition: -2 * jnp.sin(z))
    certificate = certify(flow, jnp.array([[2.0], [-2.0]]))
    assert certificate.min_determinant > 0
    assert certificate.verdict == "folds"
    assert not certificate.round_trip < 1e-3


def test_a_reflection_folds():
    flow = DDNF(jr.key(0), 2, blocks=1, steps=1, field=linear_field(jnp.diag(jnp.array([-2.0, 0.0]))))
    certificate = certify(flow, X)
    assert certificate.verdict == "folds"
    assert_allclose(certificate.min_determinant, -1.0)
    assert certificate.folded_share == 1.0


@pytest.mark.parametrize("solver", [euler, midpoint, rk4])
@pytest.mark.parametrize("condition_dim", [None, 3])
def test_guarantee_is_proved_and_the_bound_holds(solver, condition_dim):
    """Huge weights: the bound is met, and no pair of points is moved apart by more than it allows."""
    flow = DDNF(
        jr.key(0),
        2,
        blocks=3,
        steps=2,
        output_scale=50.0,
        lipschitz=0.9,
        solver=solver,
        condition_dim=condition_dim,
        context_rank=0 if condition_dim is None else 2,
    )
    condition = None if condition_dim is None else 10 * jr.normal(jr.key(2), (len(X), 3))
    certificate = certify(flow, X, condition)
    assert certificate.verdict == "proved diffeomorphism"
    assert certificate.lipschitz.max() <= 0.9 * (1 + 1e-9)
    assert certificate.min_determinant > 0.1**2


def test_guarantee_leaves_a_calm_flow_alone():
    free, bound = (DDNF(jr.key(0), 2, lipschitz=c) for c in (None, 0.9))
    images = jax.jit(lambda x: [jax.vmap(flow.transform)(x) for flow in (free, bound)])(X)
    assert_allclose(*images, atol=1e-14)


def test_bound_is_not_below_the_truth():
    flow = DDNF(jr.key(5), 2, blocks=3, steps=4, output_scale=2.0)
    bound = certify(flow).lipschitz
    for k in range(3):
        field = jax.tree.map(lambda a, k=k: a[k], flow.fields)
        jacobians = jax.jit(jax.vmap(jax.jacobian(field)))(X)
        assert np.linalg.norm(jacobians, 2, axis=(1, 2)).max() / 4 <= bound[k]
