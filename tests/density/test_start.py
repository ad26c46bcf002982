"""Mixtures and the start of a default fit: densities, expectation maximization, and which start is taken."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import Identity
from numpy.testing import assert_allclose
from scipy.stats import multivariate_normal, multivariate_t

import ddnf
from ddnf import Density, fit_density
from ddnf.density.likelihood import log_prob
from ddnf.density.mixture import Mixture, fit_mixture, with_freedom
from ddnf.density.prepare import prepare
from ddnf.density.problem import split_table
from ddnf.density.regression import Regression, fit_regression, residuals
from ddnf.density.start import folds, start

RNG = np.random.default_rng(0)


def mixture(freedom=None, dim=2):
    factors = np.tril(RNG.normal(size=(3, dim, dim)), -1) + np.eye(dim) * RNG.uniform(0.5, 2, size=(3, 1, dim))
    return Mixture(np.array([0.2, 0.5, 0.3]), 3 * RNG.normal(size=(3, dim)), factors, freedom)


@pytest.mark.parametrize("freedom", [None, 1.5, 4.0, 1e4])
@pytest.mark.parametrize("dim", [1, 2, 5])
def test_mixture_is_that_of_scipy(freedom, dim):
    ours, z = mixture(freedom, dim), RNG.normal(size=(20, dim))
    expected = 0.0
    for weight, centre, factor in zip(jnp.exp(ours.logits), ours.centres, ours._triangular(), strict=True):
        shape = np.linalg.inv(np.asarray(factor.T @ factor))
        component = multivariate_normal(centre, shape) if freedom is None else multivariate_t(centre, shape, df=freedom)
        expected = expected + weight * component.pdf(z)
    assert_allclose(ours.log_prob(jnp.asarray(z)), np.log(expected), rtol=1e-7)


def test_draws_of_a_mixture_with_tails():
    """By the share of draws in a region whose probability is that of SciPy's draws."""
    ours = Mixture(np.ones(1), np.zeros((1, 2)), np.eye(2)[None], 3.0)
    far = np.linalg.norm(np.asarray(ours.sample(jr.key(0), 20_000)), axis=1) > 3
    expected = np.linalg.norm(multivariate_t([0, 0], np.eye(2), df=3).rvs(200_000, random_state=0), axis=1) > 3
    assert abs(far.mean() - expected.mean()) < 4 * np.sqrt(expected.mean() / 20_000)


def test_expectation_maximization_with_tails():
    rows = multivariate_t([1.0, -1.0], [[1.0, 0.6], [0.6, 1.0]], df=3).rvs(4000, random_state=1)
    normal = fit_mixture(RNG, rows, 1)
    truth = multivariate_t([1.0, -1.0], [[1.0, 0.6], [0.6, 1.0]], df=3).logpdf(rows).mean()
    assert np.mean(normal.log_prob(rows)) < truth - 0.05
    assert_allclose(np.mean(with_freedom(normal, rows, 3.0).log_prob(rows)), truth, atol=0.01)


def test_regression():
    condition = RNG.normal(size=(3000, 2))
    deviation = np.exp(0.5 * condition[:, :1])
    rows = np.concatenate([condition @ [[1.0], [-2.0]], RNG.normal(size=(3000, 1))], axis=1)
    rows = rows + deviation * RNG.normal(size=(3000, 2))
    found = fit_regression(rows, condition, has_scale=True)
    assert_allclose(found.shift_weights, [[1.0, -2.0], [0.0, 0.0]], atol=0.15)
    assert_allclose(found.log_scale_weights[0], [0.5, 0.0], atol=0.1)
    left, log_det = residuals(found, rows, condition)
    ours = jax.vmap(found.transform_and_log_det)(jnp.asarray(rows), jnp.asarray(condition))
    assert_allclose(ours[0], left, rtol=1e-6, atol=1e-9)
    assert_allclose(ours[1], log_det, rtol=1e-6, atol=1e-9)
    jacobian = jax.jacobian(found.transform)(jnp.asarray(rows[0]), jnp.asarray(condition[0]))
    assert_allclose(np.linalg.slogdet(jacobian)[1], log_det[0], rtol=1e-6)
    back = jax.vmap(found.inverse)(ours[0], jnp.asarray(condition))
    assert_allclose(back, rows, rtol=1e-9)
    assert_allclose(Regression(2, 2).transform(jnp.ones(2), jnp.ones(2)), 1.0)


def test_start_takes_a_regression():
    condition = RNG.normal(size=(500, 1))
    rows = 3 * condition + RNG.normal(size=(500, 1))
    known = condition[:400], condition[400:]
    begin = start(RNG, Identity((1,)), rows[:400], rows[400:], given=known)
    value = log_prob(begin.model, jnp.asarray(rows[400:]), jnp.asarray(known[1]))
    assert np.mean(value) > -0.5 * np.log(2 * np.pi * np.e) - 0.15
    assert any(np.allclose(value, tried, rtol=1e-6) for tried in begin.log_prob)


def test_draws_of_a_mixture():
    ours = mixture()
    draws = np.asarray(ours.sample(jr.key(0), 40_000))
    mean = np.exp(ours.logits) @ ours.centres
    assert np.max(np.abs(draws.mean(axis=0) - mean) / draws.std(axis=0)) * 200 < 4
    side = np.linspace(-15, 15, 301)
    grid = jnp.asarray(np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2))
    assert_allclose(jnp.sum(jnp.exp(ours.log_prob(grid))) * 0.01, 1.0, atol=1e-3)


def test_expectation_maximization_finds_clusters():
    centres = np.array([[0.0, 0.0], [6.0, 0.0], [0.0, 6.0], [6.0, 6.0]])
    rows = centres[RNG.integers(4, size=800)] + 0.5 * RNG.normal(size=(800, 2))
    truth = 0.0
    for centre in centres:
        truth = truth + 0.25 * multivariate_normal.pdf(rows, centre, 0.25)
    found = np.mean(fit_mixture(RNG, rows, 4).log_prob(rows))
    assert found > np.mean(np.log(truth)) - 0.02


def test_fewer_distinct_rows_than_components():
    rows = np.repeat([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0]], 20, axis=0)
    assert np.isfinite(fit_mixture(RNG, rows, 8).log_prob(rows)).all()


@pytest.mark.slow
def test_rows_close_to_a_curve_have_a_weak_prior():
    """With the prior of full strength no component is as thin as the curve."""
    t = RNG.uniform(0, 6, size=(1500, 1))
    rows = np.hstack([t - 3, np.sin(t), np.cos(2 * t)]) + 0.02 * RNG.normal(size=(1500, 3))
    begin = start(RNG, Identity((3,)), rows[:1300], rows[1300:])
    strong = fit_mixture(RNG, rows[:1300], 64).log_prob(rows[1300:]).mean()
    assert begin.choice is not None and begin.choice.prior < 0.3
    assert begin.log_prob.mean(axis=1).max() > strong + 0.5


def test_covariance_of_few_rows_is_shrunk():
    """Standard normal rows in 40 dimensions: the covariance of 60 rows loses a nat for each column of new ones."""
    rows, new = RNG.normal(size=(60, 40)), RNG.normal(size=(200, 40))
    truth = multivariate_normal.logpdf(new, np.zeros(40)).mean()
    plain = multivariate_normal.logpdf(new, rows.mean(axis=0), np.cov(rows.T)).mean()
    found = fit_mixture(RNG, rows, 1).log_prob(new).mean()
    assert plain < truth - 20 and found > truth - 2


CASES = {
    "normal": (RNG.normal(size=(600, 2)) @ [[1.0, 0.7], [0.0, 0.5]], (1,)),
    "clusters": (8.0 * RNG.integers(0, 2, size=(600, 1)) + RNG.normal(size=(600, 2)), (2, 4, 8)),
}


def test_few_held_out_rows_do_not_decide_alone():
    """Held-out rows in two tight groups, which two components describe better; other rows take turns with them."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(150, 2))
    held_out = np.array([[1.5, 0.0], [-1.5, 0.0]] * 6) + 0.05 * rng.normal(size=(12, 2))
    begin = start(np.random.default_rng(0), Identity((2,)), rows, held_out)
    assert begin.log_prob.mean(axis=1).argmax() > 1
    assert begin.choice is not None and begin.choice.components == 1


def test_rows_that_judge_do_not_train():
    turns = folds(np.arange(30.0)[:, None], 12)
    assert [list(judged) for _, judged in turns] == [[*range(18, 30)], [*range(12)]]
    assert all(sorted([*trained, *judged]) == [*range(30)] for trained, judged in turns)
    assert len(folds(np.arange(2000.0)[:, None], 200)) == 1 and len(folds(np.arange(10.0)[:, None], 1)) == 10


@pytest.mark.parametrize("place", [0, 40, 200])
def test_a_column_that_is_constant_but_for_one_row(place):
    """Whether that row is held out at first, in a later turn, or never: a constant column would have no scale."""
    rows = np.column_stack([RNG.normal(size=(300, 2)), np.full(300, 5.0)])
    rows[np.random.default_rng(np.asarray(jr.key_data(jr.key(0)))).permutation(300)[place], 2] = 6.0
    problem = split_table(jr.key(0), prepare(rows, None), 30, adaptive=True, penalty=0.0)
    assert sorted(problem.order) == [*range(300)]
    begin = start(RNG, Identity((3,)), problem.standard, np.asarray(problem.u, float), components=1)
    assert np.isfinite(begin.log_prob).all()


@pytest.mark.parametrize("case", CASES)
def test_start_is_the_best_candidate(case):
    rows, components = CASES[case]
    begin = start(RNG, Identity((2,)), rows[:500], rows[500:])
    value = np.asarray(log_prob(begin.model, jnp.asarray(rows[500:]), None))
    # Tails may cost one nat of all held-out rows together.
    assert 0 <= begin.log_prob.mean(axis=1).max() - value.mean() + 1e-6 <= 1 / 100 + 1e-6
    assert begin.model.base is not None and len(begin.model.base.logits) in components


def test_default_fit_is_no_worse_than_a_gaussian(tmp_path):
    """Normal rows; mixture and splines survive a file."""
    x = CASES["normal"][0][:200]
    density = fit_density(jr.key(0), x, steps=100, learning_rate=0.5, progress=False)
    gaussian = multivariate_normal.logpdf(x, x.mean(axis=0), np.cov(x.T)).mean()
    assert np.mean(density.log_prob(x)) > gaussian - 0.05
    density = dataclasses.replace(density, is_trained=False)
    assert "no flow improved" in str(density)
    density.save(tmp_path / "model.ddnf")
    loaded = ddnf.load(tmp_path / "model.ddnf")
    assert isinstance(loaded, Density) and str(loaded) == str(density)
    assert np.array_equal(loaded.log_prob(x), density.log_prob(x))
    assert np.array_equal(loaded.sample(jr.key(0), 5), density.sample(jr.key(0), 5))


def test_small_table_is_fitted_again_with_all_rows():
    """Held-out rows that differ from the others: the mean of the draws is that of all rows."""
    x = np.random.default_rng(1).normal(size=(400, 2))
    held = np.random.default_rng(np.asarray(jr.key_data(jr.key(0)))).permutation(400)[:40]
    x[held] += 1.5
    density = fit_density(jr.key(0), x, steps=200, progress=False)
    assert density.has_all_rows and (density.train_rows, density.held_out_rows) == (360, 40)
    assert "all 400 rows" in str(density)
    means = np.asarray(density.sample(jr.key(1), 40_000)).mean(axis=0)
    trained = np.delete(x, held, axis=0).mean(axis=0)
    assert np.all(np.abs(means - x.mean(axis=0)) < np.abs(means - trained))


def test_default_fit_of_a_table_with_an_extreme_value():
    x = RNG.normal(size=(200, 2))
    x[7, 1] = 1e30
    with pytest.warns(RuntimeWarning, match="the farthest is 1e"):
        density = fit_density(jr.key(0), x, steps=100, progress=False)
    draws = density.sample(jr.key(1), 1000)
    assert np.all(np.abs(draws.std(axis=0) - 1) < 0.3)
    assert np.isfinite(density.log_prob([0.0, 1e30]))
