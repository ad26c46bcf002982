"""Splines on columns: the bijection, its start from quantiles, and its tails."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf.density.splines import ColumnSplines, fit_splines, map_rows
from ddnf.density.whitening import Whitening

RNG = np.random.default_rng(0)
COLUMNS = {
    "normal": RNG.normal(size=3000),
    "exponential": RNG.exponential(size=3000) - 0.7,
    "two modes": np.where(RNG.random(3000) < 0.3, -3.0, 1.0) + 0.2 * RNG.normal(size=3000),
    "Cauchy": RNG.standard_cauchy(3000),
    "ties": np.round(RNG.normal(size=3000), 1),
}


def rough(heavy=None):
    """Splines far from the identity."""
    splines = ColumnSplines(3, 6, heavy)
    arrays, static = eqx.partition(splines, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(arrays)
    keys = jr.split(jr.key(0), len(leaves))
    moved = [leaf + 0.5 * jr.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return eqx.combine(jax.tree.unflatten(structure, moved), static)


@pytest.mark.parametrize("heavy", [None, (False, True, True)], ids=["linear tails", "heavy tails"])
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["inside", "tails"])
def test_bijection(heavy, scale):
    splines = rough(heavy)
    for x in scale * jr.normal(jr.key(1), (20, 3)):
        y, log_det = splines.transform_and_log_det(x)
        jacobian = jax.jacobian(splines.transform)(x)
        assert_allclose(jacobian, jnp.diag(jnp.diag(jacobian)), atol=1e-12)
        assert_allclose(log_det, jnp.sum(jnp.log(jnp.diag(jacobian))), atol=1e-9)
        back, inverse_log_det = splines.inverse_and_log_det(y)
        assert_allclose(back, x, rtol=1e-8, atol=1e-8)
        assert_allclose(inverse_log_det, -log_det, atol=1e-7)


@pytest.mark.parametrize("heavy", [None, (False, True, True)], ids=["linear tails", "heavy tails"])
def test_rows_without_compilation(heavy):
    splines, rows = rough(heavy), np.concatenate([RNG.normal(size=(50, 3)), 30 * RNG.normal(size=(50, 3))])
    mapped, log_det = map_rows(splines, rows)
    expected = jax.vmap(splines.transform_and_log_det)(jnp.asarray(rows))
    assert_allclose(mapped, expected[0], rtol=1e-9, atol=1e-9)
    assert_allclose(log_det, expected[1], rtol=1e-9, atol=1e-9)


def test_continuous_with_its_slope_at_knots_and_ends():
    splines = rough()
    knots = splines._knots()[0]
    slope = jax.vmap(lambda x: jnp.diag(jax.jacobian(splines.transform)(x)))
    for column in knots.T:
        for function in (jax.vmap(splines.transform), slope):
            left, right = function(jnp.stack([column - 1e-9, column + 1e-9]))
            assert_allclose(left, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", COLUMNS)
def test_quantiles_make_columns_normal(name):
    column = COLUMNS[name][:, None]
    splines = fit_splines(column)
    assert splines.heavy == (name == "Cauchy",)
    mapped = np.sort(map_rows(splines, column)[0][:, 0])
    assert np.isfinite(mapped).all()
    if name != "ties":
        for share in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
            expected = jax.scipy.stats.norm.ppf(share)
            assert_allclose(np.quantile(mapped, share), expected, atol=0.1)


def test_whitening():
    whitening = Whitening(RNG.normal(size=3), np.tril(RNG.normal(size=(3, 3)), -1) + np.eye(3))
    x = jnp.asarray(RNG.normal(size=3))
    y, log_det = whitening.transform_and_log_det(x)
    assert_allclose(log_det, jnp.linalg.slogdet(jax.jacobian(whitening.transform)(x))[1], atol=1e-12)
    back, inverse_log_det = whitening.inverse_and_log_det(y)
    assert_allclose(back, x, atol=1e-12)
    assert_allclose(inverse_log_det, -log_det, atol=1e-12)
    gradient = eqx.filter_grad(lambda w: jnp.sum(w.transform(x)))(whitening)
    assert not gradient.matrix.any() and not gradient.shift.any()  # it stays as it is in training


def test_far_values_stay_finite():
    splines = fit_splines(COLUMNS["Cauchy"][:, None])
    y, log_det = splines.transform_and_log_det(jnp.array([1e30]))
    assert np.isfinite(y).all() and np.isfinite(log_det) and abs(y[0]) < 1000
