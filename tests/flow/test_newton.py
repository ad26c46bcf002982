"""The exact inverse: convergence, folds, and how the paper's inverse compares."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf import DDNF, certify, euler


@pytest.mark.parametrize("hidden", [(16, 16), (2, 2)])
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 4.0])
def test_random_flows_wherever_the_certificate_does_not_say_folds(hidden, scale):
    """Many random flows, coarse ones among them, up to the point where they fold."""
    x = jr.normal(jr.key(1), (50, 2))
    unfolded = 0
    for seed in range(15):
        flow = DDNF(jr.key(seed), 2, blocks=2, steps=2, hidden=hidden, output_scale=scale)
        certificate = certify(flow, x)
        if certificate.verdict == "folds":
            continue
        unfolded += 1
        assert_allclose(_there_and_back(flow, x)[2], x, atol=1e-10)
        in_float32 = jax.tree.map(lambda a: a.astype(jnp.float32) if eqx.is_array(a) else a, flow)
        back = _there_and_back(in_float32, x.astype(jnp.float32))[2]
        # The wildest flows come close to a fold, where the inverse stretches rounding errors.
        stretch = min(1, certificate.min_determinant) if scale > 1 else 1
        assert_allclose(back, x, atol=1e-5 / stretch)
    assert unfolded >= 3


@eqx.filter_jit
def _there_and_back(flow, x):
    y, log_det = jax.vmap(flow.transform_and_log_det)(x)
    return y, log_det, *jax.vmap(flow.inverse_and_log_det)(y)


def test_says_so_where_there_is_no_inverse():
    """z + v(z) = tanh(z) never reaches 3."""
    bounded = DDNF(jr.key(0), 1, field=lambda key: lambda z, condition: jnp.tanh(z) - z, blocks=1, steps=1)
    with pytest.warns(RuntimeWarning, match="No inverse found"):
        x = jax.block_until_ready(jax.vmap(bounded.inverse)(jnp.array([[0.5], [3.0]])))
    assert_allclose(x[0], jnp.arctanh(0.5), atol=1e-12)
    assert np.isnan(x[1]).all()


def test_hard_cells_need_damping():
    """A cell that is invertible but strongly bent: undamped Newton jumps back and forth."""

    def bend(z):
        return 30 * (jnp.arctan(20 * z) + z / 60)

    y = jnp.linspace(-80.0, 80.0, 41)[None, :, None]
    x = jax.vmap(jax.vmap(euler.step(bend, 1.0).inverse))(y)
    assert_allclose(x + bend(x), y, atol=1e-12)


def test_hessian_of_the_log_density():
    """Second derivatives go through the inverse too."""
    flow = DDNF(jr.key(1), 2, blocks=2, steps=2, output_scale=1.0)

    def log_det(y):
        return flow.inverse_and_log_det(y)[1]

    y, direction, step = jnp.array([0.3, -0.4]), jnp.array([0.6, 0.8]), 1e-5
    hessian = jax.jit(jax.hessian(log_det))(y)
    gradient = jax.jit(jax.grad(log_det))
    assert_allclose(
        hessian @ direction, (gradient(y + step * direction) - gradient(y - step * direction)) / (2 * step), atol=1e-8
    )


def test_reverse_is_of_first_order():
    errors, log_det_errors, steps = [], [], np.array([8, 16, 32, 64])
    x = jr.normal(jr.key(0), (20, 2))
    for n in steps:
        flow = DDNF(jr.key(1), 2, blocks=2, steps=int(n), output_scale=1.0, inverse="reverse")
        _, log_det, back, reverse_log_det = map(np.asarray, _there_and_back(flow, x))
        errors.append(np.mean(np.abs(back - x)))
        log_det_errors.append(np.mean(np.abs(reverse_log_det + log_det)))
    for error in (errors, log_det_errors):
        assert_allclose(-np.polyfit(np.log(steps), np.log(error), 1)[0], 1, atol=0.15)
