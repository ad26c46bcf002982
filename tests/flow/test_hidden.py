"""A block among its hidden units is the same map, with the same log-determinant and inverse."""

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from numpy.testing import assert_allclose

from ddnf import DDNF, Divergence, Exact, Taylor
from ddnf.flow import hidden


@pytest.mark.parametrize("widths", [(3,), (2, 2), (6, 2, 5)], ids=str)
@pytest.mark.parametrize("rule", [Exact(), Taylor(3), Divergence()], ids=lambda rule: type(rule).__name__)
def test_same_as_among_the_points(monkeypatch, widths, rule):
    flow = DDNF(jr.key(0), 20, blocks=2, steps=4, hidden=widths, output_scale=1.0, log_det=rule, lipschitz=0.9)
    x = jr.normal(jr.key(1), (5, 20))

    def ways(x):
        y, log_det = jax.vmap(flow.transform_and_log_det)(x)
        return y, log_det, *jax.vmap(flow.inverse_and_log_det)(y), *jax.vmap(flow.reverse_and_log_det)(y)

    assert hidden.pays(flow.velocity(jax.tree.map(lambda a: a[0], flow.fields), None), flow.steps)
    among_hidden = jax.jit(ways)(x)
    monkeypatch.setattr(hidden, "pays", lambda velocity, steps: False)
    among_points = jax.jit(lambda x: ways(x))(x)
    assert jnp.max(jnp.abs(among_points[0] - x)) > 0.1
    for ours, theirs in zip(among_hidden, among_points, strict=True):
        assert_allclose(ours, theirs, atol=1e-12)


def test_it_pays_where_points_have_many_dimensions():
    def pays(dim, widths, steps=8):
        flow = DDNF(jr.key(0), dim, blocks=1, hidden=widths, steps=steps)
        return hidden.pays(flow.velocity(jax.tree.map(lambda a: a[0], flow.fields), None), steps)

    assert pays(40, (16,)) and pays(40, (2, 2)) and pays(40, (64, 8, 64))
    assert not pays(2, (16, 16)) and not pays(40, (16,), steps=1) and not pays(5, (64, 3, 64))
    assert not pays(10, (3,), steps=2)
