"""Solvers show their order against an accurate solution of Diffrax."""

from functools import cache

import diffrax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from ddnf import DDNF, Divergence, MLPField, euler, midpoint, rk4

FIELD = MLPField(jr.key(3), 2, hidden=(6, 6), output_scale=2.0)
START = jnp.array([0.4, -0.9])


@cache
def accurate():
    """z and the integral of tr J after unit time."""

    def vector_field(t, state, _):
        return jnp.append(FIELD(state[:2]), jnp.trace(jax.jacobian(FIELD)(state[:2])))

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(vector_field),
        diffrax.Dopri8(),
        0.0,
        1.0,
        0.05,
        jnp.append(START, 0.0),
        stepsize_controller=diffrax.PIDController(rtol=1e-12, atol=1e-12),
    )
    assert solution.ys is not None
    return solution.ys[0, :2], solution.ys[0, 2]


@pytest.mark.parametrize(("solver", "order"), [(euler, 1), (midpoint, 2), (rk4, 4)])
def test_order_of_the_map_and_of_the_continuous_log_det(solver, order):
    z, log_det = accurate()
    steps = np.array([8, 16, 32])
    errors = []
    for n in steps:
        flow = DDNF(jr.key(0), 2, field=lambda key: FIELD, blocks=1, steps=int(n), solver=solver, log_det=Divergence())
        end, change = flow.transform_and_log_det(START)
        errors.append((np.abs(end - z).max(), abs(change - log_det)))
    slopes = np.polyfit(np.log(steps), np.log(errors), 1)[0]
    np.testing.assert_allclose(-slopes, order, atol=0.25)


def test_each_block_lasts_one_unit_of_time():
    constant = DDNF(jr.key(0), 2, field=lambda key: lambda z, condition: jnp.array([1.0, 2.0]), blocks=3, steps=5)
    np.testing.assert_allclose(constant.transform(jnp.zeros(2)), [3.0, 6.0], rtol=1e-12)
