"""Whole batches: the same as one point after another, in any order of `vmap`, `jit` and `grad`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import Affine, Chain, Invert, Scan, Sigmoid, Vmap
from numpy.testing import assert_allclose

import ddnf
from ddnf.flow import batch
from ddnf.flow import bijection as module
from tests.bijections import BIJECTIONS, points

SHAPES = [(2, (4, 4)), (6, (5,)), (10, (12, 12)), (20, (24, 24))]


def one_by_one(function, *arguments):
    return jax.lax.map(lambda row: function(*row), arguments)


@pytest.mark.parametrize("name", BIJECTIONS)
def test_batch_methods_are_the_same_as_one_by_one(name):
    flow = BIJECTIONS[name]()
    x, condition = points(flow, n=7)
    rows = (x,) if condition is None else (x, condition)

    @jax.jit
    def run(x, condition):
        y, log_det = flow.batch_transform_and_log_det(x, condition)
        return y, log_det, *flow.batch_inverse_and_log_det(y, condition)

    y, log_det, back, inverse_log_det = run(x, condition)
    expected_y, expected_log_det = one_by_one(flow.transform_and_log_det, *rows)
    assert_allclose(y, expected_y, atol=1e-12)
    assert_allclose(batch.transform(flow, x, condition), expected_y, atol=1e-12)
    assert_allclose(log_det, expected_log_det, atol=1e-12)
    assert_allclose(back, x, atol=1e-9)
    assert_allclose(inverse_log_det, -log_det, atol=1e-9)
    if condition is not None:
        shared = flow.batch_transform_and_log_det(x, condition[0])[0]
        assert_allclose(shared[0], y[0], atol=1e-12)
        assert np.abs(shared[1:] - y[1:]).max() > 1e-6


@pytest.mark.parametrize(("dim", "hidden"), SHAPES, ids=str)
@pytest.mark.parametrize("condition_dim", [None, 3])
def test_chunks_and_gradients(monkeypatch, dim, hidden, condition_dim):
    """A batch in chunks that do not come out even has the gradient of points mapped one after another."""
    monkeypatch.setattr(module, "_CHUNKS", ((np.inf, 16),))
    flow = ddnf.DDNF(
        jr.key(0), dim, blocks=2, steps=2, hidden=hidden, output_scale=1.0, condition_dim=condition_dim, lipschitz=0.9
    )
    x = jr.normal(jr.key(1), (37, dim))
    condition = None if condition_dim is None else jr.normal(jr.key(2), (37, condition_dim))
    rows = (x,) if condition is None else (x, condition)

    def in_chunks(flow):
        y, log_det = flow.batch_transform_and_log_det(x, condition)
        return jnp.sum(y**2) - jnp.sum(log_det)

    def apart(flow):
        y, log_det = one_by_one(flow.transform_and_log_det, *rows)
        return jnp.sum(y**2) - jnp.sum(log_det)

    value, gradient = eqx.filter_jit(eqx.filter_value_and_grad(in_chunks))(flow)
    other_value, other_gradient = eqx.filter_jit(eqx.filter_value_and_grad(apart))(flow)
    assert_allclose(value, other_value, rtol=1e-12)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(other_gradient), strict=True):
        assert_allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("dim", [2, 10])
def test_any_order_of_transformations(dim):
    flow = ddnf.DDNF(jr.key(0), dim, blocks=2, steps=2, hidden=(12,), output_scale=1.0)
    x = jr.normal(jr.key(1), (6, dim))
    arrays, static = eqx.partition(flow, eqx.is_inexact_array)

    def loss(arrays, x):
        y, log_det = eqx.combine(arrays, static).transform_and_log_det(x)
        return jnp.sum(jnp.sin(y)) - log_det

    expected = one_by_one(lambda x: jax.value_and_grad(loss)(arrays, x), x)
    over = dict(in_axes=(None, 0))
    orders = [
        jax.vmap(jax.value_and_grad(loss), **over),
        jax.jit(jax.vmap(jax.value_and_grad(loss), **over)),
        jax.vmap(jax.jit(jax.value_and_grad(loss)), **over),
        jax.vmap(jax.value_and_grad(jax.jit(loss)), **over),
        jax.vmap(jax.vmap(jax.value_and_grad(loss), **over), **over),
    ]
    for number, order in enumerate(orders):
        found = order(arrays, x.reshape(2, 3, dim) if number == 4 else x)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_allclose(a.reshape(b.shape), b, atol=1e-12)
    outside = jax.jit(jax.grad(lambda arrays: jnp.sum(jax.vmap(loss, **over)(arrays, x))))(arrays)
    for a, b in zip(jax.tree.leaves(outside), jax.tree.leaves(expected[1]), strict=True):
        assert_allclose(a, jnp.sum(b, axis=0), atol=1e-11)


def test_through_chains_inverses_and_other_bijections():
    flow = ddnf.DDNF(jr.key(0), 2, blocks=2, steps=2, output_scale=1.0)
    x = jr.normal(jr.key(1), (5, 2))
    affine = Affine(jnp.ones(2), jnp.array([0.5, 2.0]))
    for bijection in (flow, Invert(flow), Chain([affine, Invert(Chain([flow, affine])), Sigmoid((2,))])):
        for ours, theirs in (
            (batch.transform_and_log_det, bijection.transform_and_log_det),
            (batch.inverse_and_log_det, bijection.inverse_and_log_det),
        ):
            points = x if ours is batch.transform_and_log_det else jax.vmap(bijection.transform)(x)
            for a, b in zip(ours(bijection, points), jax.vmap(theirs)(points), strict=True):
                assert_allclose(a, b, atol=1e-9)


def test_inside_flowjax_scan_and_vmap():
    """FlowJAX's own stacking gives the same as layers one after another, and side by side."""
    keys = jr.split(jr.key(0), 3)
    make = eqx.filter_vmap(lambda key: ddnf.DDNF(key, 4, blocks=2, steps=2, hidden=(9,), output_scale=1.0))
    layers = [ddnf.DDNF(key, 4, blocks=2, steps=2, hidden=(9,), output_scale=1.0) for key in keys]
    x = jr.normal(jr.key(1), (5, 4))
    scanned = Scan(make(keys))
    y, log_det = jax.jit(jax.vmap(lambda x: scanned.transform_and_log_det(x)))(x)
    expected = batch.transform_and_log_det(Chain(layers), x)
    assert_allclose(y, expected[0], atol=1e-12)
    assert_allclose(log_det, expected[1], atol=1e-12)
    side_by_side = Vmap(make(keys), in_axes=eqx.if_array(0))
    y, log_det = jax.jit(lambda x: side_by_side.transform_and_log_det(x))(x[:3])
    for i, layer in enumerate(layers):
        assert_allclose(y[i], layer.transform(x[i]), atol=1e-12)


def test_a_point_does_not_depend_on_its_batch():
    flow = ddnf.DDNF(jr.key(0), 5, blocks=2, steps=2, hidden=(9,), output_scale=1.0)
    x = jr.normal(jr.key(1), (8, 5))
    wild = x.at[1:].multiply(1e3)
    assert_allclose(flow.batch_transform_and_log_det(wild)[0][0], flow.batch_transform_and_log_det(x)[0][0], rtol=1e-14)


def test_the_elimination_is_not_computed_twice():
    """Under `vmap` the pivoted fallback stays a branch: nothing turns it into a `select`."""
    flow = ddnf.DDNF(jr.key(0), 5, blocks=1, steps=1, hidden=(9,))
    for jit in (lambda f: f, jax.jit):
        function = jax.vmap(jit(lambda x: flow.transform_and_log_det(x)))
        assert " cond[" in str(jax.make_jaxpr(function)(jnp.ones((4, 5))))
