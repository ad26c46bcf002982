"""The checks that every bijection of the table passes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import Affine, Chain, Invert
from flowjax.distributions import Normal, StandardNormal, Transformed
from numpy.testing import assert_allclose

import ddnf
from tests.bijections import BIJECTIONS, points

every_row = pytest.mark.parametrize("name", BIJECTIONS)
some_rows = pytest.mark.parametrize("name", ["plane", "condition, rank 5 swish", "midpoint"])


def axes(condition):
    return (0, None if condition is None else 0)


@every_row
def test_it_is_a_bijection(name):
    """Log-determinant against autodiff, inverse, and path, in float64."""
    flow = BIJECTIONS[name]()
    x, condition = points(flow, n=20)
    assert ddnf.certify(flow, x, condition).verdict != "folds"

    @jax.jit
    def run(x, condition):
        def one(x, condition):
            return jax.jacobian(flow.transform)(x, condition), *flow.path(x, condition)

        y, log_det = jax.vmap(flow.transform_and_log_det, axes(condition))(x, condition)
        back = jax.vmap(flow.inverse_and_log_det, axes(condition))(y, condition)
        # One point with all conditions, which must move its image.
        first = None if condition is None else jax.vmap(flow.transform_and_log_det, (None, 0))(x[0], condition)
        return first, y, log_det, *back, *jax.vmap(one, axes(condition))(x, condition)

    first, y, log_det, back, inverse_log_det, jacobian, end, path = run(x, condition)
    assert_allclose(log_det, np.linalg.slogdet(jacobian)[1], atol=1e-10)
    assert_allclose(back, x, atol=1e-10)
    assert_allclose(inverse_log_det, -np.asarray(log_det), atol=1e-10)
    assert_allclose(end, y, atol=1e-12)
    assert_allclose(jnp.sum(path.log_dets, (1, 2)), log_det, atol=1e-12)
    assert path.points.shape == path.velocities.shape == (20, flow.blocks, flow.steps, *flow.shape)
    assert_allclose(path.points[:, 0, 0], x, atol=0)
    if first is not None:
        assert np.abs(np.diff(first[0][:2], axis=0)).max() > 1e-3
        assert abs(np.diff(first[1][:2])) > 1e-6


@every_row
def test_inverse_in_float32(name):
    flow = jax.tree.map(lambda a: a.astype(jnp.float32) if eqx.is_inexact_array(a) else a, BIJECTIONS[name]())
    x, condition = points(flow, n=40, dtype=jnp.float32)

    @jax.jit
    def run(x, condition):
        y, log_det = jax.vmap(flow.transform_and_log_det, axes(condition))(x, condition)
        return log_det, *jax.vmap(flow.inverse_and_log_det, axes(condition))(y, condition)

    log_det, back, inverse_log_det = run(x, condition)
    assert log_det.dtype == back.dtype == jnp.float32
    assert_allclose(back, x, atol=1e-5)
    assert_allclose(inverse_log_det, -log_det, atol=2e-5)


@every_row
def test_gradients_of_both_ways_reach_everything(name):
    """Every parameter, the point and the condition have a gradient, and it agrees with finite differences."""
    flow = BIJECTIONS[name]()
    arrays, static = eqx.partition((flow, *points(flow, n=3)), eqx.is_inexact_array)

    def loss(arrays):
        flow, x, condition = eqx.combine(arrays, static)
        y, log_det = jax.vmap(flow.transform_and_log_det, axes(condition))(x, condition)
        z, inverse_log_det = jax.vmap(flow.inverse_and_log_det, axes(condition))(x, condition)
        return jnp.sum(jnp.sin(y)) - jnp.sum(log_det) + jnp.sum(jnp.sin(2 * z)) + 2 * jnp.sum(inverse_log_det)

    value_and_gradient = jax.jit(jax.value_and_grad(loss))
    gradient = [np.asarray(leaf) for leaf in jax.tree.leaves(value_and_gradient(arrays)[1])]
    for leaf in gradient:
        assert np.isfinite(leaf).all() and (leaf != 0).any()
    leaves, structure = jax.tree.flatten(arrays)
    rng = np.random.default_rng(5)
    direction = [rng.normal(size=leaf.shape) for leaf in leaves]

    def along(step):
        # The same program as for the gradient: another would have to be compiled.
        moved = [np.asarray(a) + step * d for a, d in zip(leaves, direction, strict=True)]
        return value_and_gradient(jax.tree.unflatten(structure, moved))[0]

    slope = sum(np.sum(g * d) for g, d in zip(gradient, direction, strict=True))
    assert_allclose(slope, (along(1e-6) - along(-1e-6)) / 2e-6, rtol=1e-6, atol=1e-6)


@some_rows
def test_batching_in_any_order_agrees(name):
    """A direct `vmap`, which uses lanes; `vmap` around `jit`, which does not; `vmap` in `vmap`; `vmap` of `grad`."""
    flow = BIJECTIONS[name]()
    x, condition = points(flow, n=4)

    def log_det(x, condition):
        return flow.transform_and_log_det(x, condition)[1]

    over = axes(condition)
    direct = jax.jit(jax.vmap(log_det, over))(x, condition)
    around_jit = jax.vmap(jax.jit(log_det), over)(x, condition)
    nested = None if condition is None else condition.reshape(2, 2, -1)
    twice = jax.jit(jax.vmap(jax.vmap(log_det, over), over))(x.reshape(2, 2, -1), nested)
    assert_allclose(around_jit, direct, atol=1e-12)
    assert_allclose(twice.ravel(), direct, atol=1e-12)
    one_condition = None if condition is None else condition[0]
    shared = jax.jit(jax.vmap(log_det, (0, None)))(x, one_condition)
    assert_allclose(shared[0], direct[0], atol=1e-12)
    outside = jax.jit(jax.grad(lambda x: jnp.sum(jax.vmap(log_det, over)(x, condition))))(x)
    inside = jax.jit(jax.vmap(jax.grad(log_det), over))(x, condition)
    assert_allclose(inside, outside, atol=1e-12)


def test_a_batch_of_flows():
    """An ensemble: the weights are batched too."""
    flows = eqx.filter_vmap(lambda key: ddnf.DDNF(key, 2, blocks=2, steps=2, output_scale=1.0))(jr.split(jr.key(0), 3))
    x = jr.normal(jr.key(1), (3, 2))
    y = eqx.filter_jit(eqx.filter_vmap(lambda flow, x: flow.transform(x)))(flows, x)
    for i in range(3):
        flow = jax.tree.map(lambda a, i=i: a[i] if eqx.is_array(a) else a, flows)
        assert_allclose(y[i], flow.transform(x[i]), atol=1e-12)


@some_rows
def test_lives_in_flowjax(name):
    """`Transformed`, `Invert` and `Chain` take it as it is; samples and their densities agree."""
    flow = BIJECTIONS[name]()
    _, condition = points(flow, n=5)
    base = StandardNormal(flow.shape)
    shape = (5,) if condition is None else ()
    loc, scale = jnp.arange(1.0, 1 + flow.shape[0]), jnp.full(flow.shape, 0.5)
    expected = Transformed(Normal(loc, scale), flow)

    @jax.jit
    def run(condition):
        pairs = []
        for bijection in (flow, Invert(flow), Chain([Affine(loc, scale), flow])):
            q = Transformed(base, bijection)
            x, log_prob = q.sample_and_log_prob(jr.key(3), shape, condition)
            pairs.append((x, log_prob, q.log_prob(x, condition)))
        return pairs

    pairs = run(condition)
    for _, log_prob, again in pairs:
        assert_allclose(again, log_prob, atol=1e-9)
    assert_allclose(expected.log_prob(pairs[-1][0], condition), pairs[-1][1], atol=1e-9)


@some_rows
def test_new_weights_do_not_recompile(name):
    flow = BIJECTIONS[name]()
    x, condition = points(flow, n=2)
    traces = []

    @eqx.filter_jit
    def run(flow, x, condition):
        traces.append(1)
        return jax.vmap(flow.transform_and_log_det, axes(condition))(x, condition)

    first, _ = run(flow, x, condition)
    second, _ = run(jax.tree.map(lambda a: 1.1 * a if eqx.is_inexact_array(a) else a, flow), x, condition)
    assert len(traces) == 1
    assert np.abs(first - second).max() > 0


def test_starts_near_the_identity():
    flow = ddnf.DDNF(jr.key(0), 3)
    x = jr.normal(jr.key(1), (100, 3))
    assert np.abs(jax.vmap(flow.transform)(x) - x).max() < 0.2


@pytest.mark.parametrize("recompute", ["cells", "segments", "nothing"])
def test_what_is_recomputed_changes_nothing(recompute):
    def gradient(recompute):
        flow = ddnf.DDNF(jr.key(0), 2, blocks=2, steps=31, output_scale=1.0, recompute=recompute)
        loss = eqx.filter_grad(lambda flow: jnp.sum(jax.vmap(flow.transform_and_log_det)(jnp.ones((3, 2)))[1]))
        return jax.tree.leaves(eqx.filter_jit(loss)(flow))

    for got, expected in zip(gradient(recompute), gradient("nothing"), strict=True):
        assert_allclose(got, expected, atol=1e-12)


def test_a_thousand_steps_train_in_the_memory_of_thirty():
    def megabytes(steps, recompute):
        flow = ddnf.DDNF(jr.key(0), 2, blocks=2, steps=steps, recompute=recompute)
        arrays, static = eqx.partition(flow, eqx.is_inexact_array)

        def loss(arrays):
            y, log_det = jax.vmap(eqx.combine(arrays, static).transform_and_log_det)(jnp.ones((256, 2)))
            return jnp.mean(jnp.sum(y**2, -1) - log_det)

        compiled = jax.jit(jax.grad(loss)).lower(arrays).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes / 2**20

    thirty = megabytes(30, "nothing")
    assert megabytes(1000, "segments") < 0.5 * thirty
    assert megabytes(1000, "cells") < 1.5 * thirty
    assert megabytes(1000, "segments") < 1.3 * megabytes(30, "segments")


def test_compile_time_does_not_grow_with_blocks_and_steps():
    """The traced program has the same size for any K and T."""

    def size(n):
        flow = ddnf.DDNF(jr.key(0), 2, blocks=n, steps=n)
        arrays, static = eqx.partition(flow, eqx.is_inexact_array)
        loss = jax.grad(lambda a: jnp.sum(jax.vmap(eqx.combine(a, static).transform_and_log_det)(jnp.ones((4, 2)))[1]))
        return str(jax.make_jaxpr(loss)(arrays)).count(" = ")

    assert size(32) == size(3) > 100
