"""Checks that every flow of the catalog passes; a new entry is tested without further code."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import Scan
from numpy.testing import assert_allclose

from ddnf.flows import BASELINES, CNF, DeepSigmoidal, Planar, Radial, for_evaluation, make
from ddnf.flows.ode import probe

# They compile slowly: left to CI.
SLOW = ("bnaf", "cnf", "cnf-hutchinson", "naf", "spline-iaf", "spline-maf")


def marked(name, *more):
    return pytest.param(name, *more, marks=pytest.mark.slow if name in SLOW else ())


every_baseline = pytest.mark.parametrize("name", [marked(name) for name in BASELINES])
every_case = pytest.mark.parametrize(
    ("name", "case"),
    [marked(name, case) for name, case in itertools.product(BASELINES, [(2, 3, None), (3, 1, 2)])],
)


def perturbed(name, dim, layers, condition_dim):
    """A small flow, moved away from its initial parameters to a map without symmetries."""
    flow = make(name, jr.key(3), dim, layers, condition_dim, size=4)
    arrays, static = eqx.partition(flow, eqx.is_inexact_array)
    rng = np.random.default_rng(4)
    moved = jax.tree.map(lambda a: jnp.asarray(np.asarray(a) + 0.3 * rng.normal(size=a.shape), a.dtype), arrays)
    return eqx.combine(moved, static)


def points(flow, n=8):
    x = 1.5 * jr.normal(jr.key(0), (n, *flow.shape))
    return x, None if flow.cond_shape is None else jr.normal(jr.key(1), (n, *flow.cond_shape))


def axes(condition):
    return (0, None if condition is None else 0)


def tolerance(name):
    # A CNF is as exact as its solver.
    return 3e-4 if name.startswith("cnf") else 1e-9


@every_case
def test_it_is_a_bijection(name, case):
    """Log-determinant against autodiff, inverse, the log-determinant of the way back, and use of the condition."""
    flow = perturbed(name, *case)
    x, condition = points(flow)

    @jax.jit
    def run(x, condition):
        def one(x, condition):
            y, log_det = flow.transform_and_log_det(x, condition)
            return log_det, jax.jacobian(flow.transform)(x, condition), *flow.inverse_and_log_det(y, condition)

        # One point with all conditions, which must move its image.
        first = None if condition is None else jax.vmap(flow.transform, (None, 0))(x[0], condition)
        return first, *jax.vmap(one, axes(condition))(x, condition)

    first, log_det, jacobian, back, inverse_log_det = run(x, condition)
    assert_allclose(back, x, atol=tolerance(name))
    assert first is None or np.abs(np.diff(first, axis=0)).max() > 1e-3
    if name != "cnf-hutchinson":
        assert_allclose(log_det, np.linalg.slogdet(jacobian)[1], atol=tolerance(name))
        assert_allclose(inverse_log_det, -np.asarray(log_det), atol=tolerance(name))
        assert np.abs(log_det).min() > 1e-3


@every_baseline
def test_float32(name):
    with jax.enable_x64(False):
        flow = perturbed(name, 3, 2, None)
        x, _ = points(flow)

        @jax.jit
        @jax.vmap
        def run(x):
            y, log_det = flow.transform_and_log_det(x)
            return log_det, *flow.inverse_and_log_det(y)

        log_det, back, inverse_log_det = run(x)
    assert log_det.dtype == back.dtype == jnp.float32
    assert_allclose(back, x, atol=3e-4)
    if name != "cnf-hutchinson":
        assert_allclose(inverse_log_det, -log_det, atol=1e-3)


@every_baseline
def test_gradients_of_both_ways_reach_everything(name):
    """Every parameter and the condition have a gradient, and it agrees with finite differences."""
    flow = perturbed(name, 3, 1, 2)
    x, condition = points(flow, n=3)
    image = jax.jit(jax.vmap(flow.transform, axes(condition)))(x, condition)
    arrays, static = eqx.partition((flow, condition), eqx.is_inexact_array)

    def losses(arrays):
        flow, condition = eqx.combine(arrays, static)
        y, log_det = jax.vmap(flow.transform_and_log_det, axes(condition))(x, condition)
        z, inverse_log_det = jax.vmap(flow.inverse_and_log_det, axes(condition))(image, condition)
        return jnp.array([jnp.sum(jnp.sin(y)) - jnp.sum(log_det), jnp.sum(jnp.sin(z)) + jnp.sum(inverse_log_det)])

    @jax.jit
    def values_and_gradients(arrays):
        return losses(arrays), jax.jacrev(losses)(arrays)

    gradient = [np.asarray(leaf) for leaf in jax.tree.leaves(values_and_gradients(arrays)[1])]
    for leaf in gradient:
        assert np.isfinite(leaf).all()
        assert (leaf[0] != 0).any() and (leaf[1] != 0).any()
    leaves, structure = jax.tree.flatten(arrays)
    rng = np.random.default_rng(5)
    direction = [rng.normal(size=leaf.shape) for leaf in leaves]

    def along(step):
        # The same program as for the gradients: another would have to be compiled.
        moved = [np.asarray(a) + step * d for a, d in zip(leaves, direction, strict=True)]
        return np.asarray(values_and_gradients(jax.tree.unflatten(structure, moved))[0])

    slope = sum(np.tensordot(g, d, d.ndim) for g, d in zip(gradient, direction, strict=True))
    step, rtol = (1e-3, 2e-2) if name.startswith("cnf") else (1e-6, 1e-6)
    assert_allclose(slope, (along(step) - along(-step)) / (2 * step), rtol=rtol, atol=rtol)


def test_a_stack_is_its_layers_one_after_another():
    flow = perturbed("planar", 2, 3, None)
    assert isinstance(flow, Scan)
    x = jnp.array([0.3, -1.0])
    expected = x
    for i in range(3):
        layer = jax.tree.map(lambda a, i=i: a[i] if eqx.is_array(a) else a, flow.bijection)
        expected = layer.transform(expected)
    assert_allclose(flow.transform(x), expected, atol=1e-14)


def test_planar_by_the_formula_and_at_its_limit():
    """z + u' tanh(w.z + b) with w.u' = m(w.u); and with w.u' at -1 to rounding it can still be inverted."""
    u, w, b, z = jnp.array([0.5, -2.0]), jnp.array([1.0, 3.0]), 0.3, jnp.array([0.2, -0.1])
    layer = eqx.tree_at(lambda p: p.parameters.start, Planar(jr.key(0), 2), jnp.concatenate([u, w, jnp.array([b])]))
    m = -1 + np.log1p(np.exp(w @ u))
    expected = z + (u + (m - w @ u) * w / (w @ w)) * np.tanh(w @ z + b)
    assert_allclose(layer.transform(z), expected, atol=1e-14)
    limit = eqx.tree_at(lambda p: p.parameters.start, layer, jnp.array([-20.0, 0.0, 1.0, 0.0, 0.0]))
    y = jnp.array([1e-3, 1.0])
    assert_allclose(limit.transform(limit.inverse(y)), y, atol=1e-14)


def test_radial_at_its_centre():
    """The norm has no gradient there, the map has."""
    layer = Radial(jr.key(0), 3)
    centre = layer.parameters.start[:3]
    assert_allclose(layer.inverse(layer.transform(centre)), centre, atol=1e-14)
    gradient = jax.grad(lambda x: jnp.sum(layer.transform(x)) + layer.transform_and_log_det(x)[1])(centre)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_sigmoids_keep_their_tails(dtype):
    """Far out the map is a line whose slope is nearly min(a): no infinity, and the way back."""
    flow = jax.tree.map(lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a, DeepSigmoidal(5))
    flow = eqx.tree_at(lambda s: s.slopes.args[0], flow, jnp.linspace(-1, 2, 5, dtype=dtype))
    least = 1e-3 + (1 - 1e-3) * (np.log1p(np.exp(-1.0)) + 1e-3)
    x = jnp.array([-1e5, -30.0, 0.0, 30.0, 1e5], dtype)
    y, log_det = jax.vmap(flow.transform_and_log_det)(x)
    assert_allclose(log_det[jnp.array([0, -1])], np.log(least), atol=1e-5)
    assert_allclose(jax.vmap(flow.inverse)(y), x, rtol=1e-5, atol=1e-5)


def test_sigmoids_have_no_plateau():
    """Between two steps that are steep to rounding the slope is small, not zero, and the inverse is found."""
    with jax.enable_x64(False):
        steep, apart = jnp.array([400.0, 400.0]), jnp.array([-600.0, 600.0])
        flow = eqx.tree_at(lambda s: (s.slopes.args[0], s.shifts), DeepSigmoidal(2), (steep, apart))
        x = jnp.linspace(-3, 3, 31)
        y, log_det = jax.vmap(flow.transform_and_log_det)(x)
        assert_allclose(jax.vmap(flow.inverse)(y), x, atol=1e-3)
    assert log_det.min() > np.log(0.9e-3)


# Those with an adaptive solver or a root finder, whose loops run until the last point of a batch is done.
@pytest.mark.parametrize("name", ["planar", "cnf", marked("bnaf"), marked("cnf-hutchinson")])
def test_an_image_does_not_depend_on_the_batch(name):
    """Beside easy points, beside hard ones (a CNF needs more steps there), or alone: the same to rounding."""
    flow = perturbed(name, 2, 1, None)
    x = jr.normal(jr.key(0), (3, 2))
    far = jnp.concatenate([x, 30 * jr.normal(jr.key(1), (5, 2)), jnp.full((1, 2), jnp.nan)])
    run = jax.jit(jax.vmap(flow.transform_and_log_det))
    (y, log_det), (far_y, far_log_det) = run(x), run(far)
    assert_allclose(far_y[:3], y, rtol=1e-12, atol=1e-12)
    assert_allclose(far_log_det[:3], log_det, rtol=1e-12, atol=1e-12)
    assert_allclose(flow.transform(x[0]), y[0], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_cnf_with_tight_tolerances():
    flow = CNF(jr.key(0), 2, condition_dim=1, size=4, rtol=1e-10, atol=1e-10)
    flow = eqx.tree_at(lambda f: f.velocity.layers[-1].weight, flow, replace_fn=lambda w: 20 * w)
    x, condition = jnp.array([0.5, -1.0]), jnp.ones(1)

    @jax.jit
    def run(x):
        y, log_det = flow.transform_and_log_det(x, condition)
        return log_det, jax.jacobian(flow.transform)(x, condition), *flow.inverse_and_log_det(y, condition)

    log_det, jacobian, back, inverse_log_det = run(x)
    assert abs(log_det) > 1e-2
    assert_allclose(log_det, jnp.linalg.slogdet(jacobian)[1], atol=1e-8)
    assert_allclose(back, x, atol=1e-8)
    assert_allclose(inverse_log_det, -log_det, atol=1e-8)


def test_hutchinson_is_unbiased_and_deterministic():
    flow = perturbed("cnf-hutchinson", 2, 1, None)
    x = jr.normal(jr.key(0), (400, 2))
    exact = for_evaluation(flow)

    @jax.jit
    def run(x):
        return (
            jax.vmap(flow.transform_and_log_det)(x),
            jax.vmap(flow.transform_and_log_det)(x[::-1]),
            jax.vmap(exact.transform_and_log_det)(x),
        )

    (y, log_det), (_, reverse), (exact_y, exact_log_det) = run(x)
    # The same probe for the same point, to the bit, so the same log-determinant to rounding.
    (key,) = flow.probe_key
    probes = jax.vmap(lambda z: probe(key, z))
    assert_allclose(probes(x[::-1])[::-1], probes(x), rtol=0, atol=0)
    assert_allclose(reverse[::-1], log_det, atol=1e-12)
    assert_allclose(y, exact_y, atol=1e-3)
    error = np.asarray(log_det - exact_log_det)
    assert error.std() > 1e-2
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(len(error))
