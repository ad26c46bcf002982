"""What one asks of a density: marginals, draws given some columns, boxes, ranks, calibration, pictures."""

import dataclasses

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import AdditiveCondition, Identity
from numpy.testing import assert_allclose
from scipy.stats import multivariate_normal, norm

from ddnf import Density
from ddnf.density.categories import fit_categories
from ddnf.density.columns import columns_from
from ddnf.density.given import sample_given
from ddnf.density.schema import Field, Schema

MEAN = np.array([1.0, -1.0, 0.5])
SCALE = np.array([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.3, -0.5, 0.7]])
COVARIANCE = SCALE @ SCALE.T


def gaussian(support=None, names=("a", "b", "c")) -> Density:
    """A density whose marginals and conditionals are known: a Gaussian in unbounded space."""
    history = np.zeros(1), np.zeros(1), np.zeros(1)
    return Density(Identity((3,)), columns_from(support, 3), MEAN, SCALE, None, None, 0.0, 0.0, *history, names)


def mixed() -> Density:
    """A fair coin and a number that is 2 larger, with deviation 1, for heads."""
    fields = Field("coin", "category", "object", ("heads", "tails")), Field("v")
    flow = AdditiveCondition(lambda c: 2.0 * jnp.asarray(c)[:1], (1,), (2,))
    history = np.zeros(1), np.zeros(1), np.zeros(1)
    number = np.zeros(1), np.eye(1), np.zeros(2), np.ones(2)
    density = Density(flow, columns_from(None, 1), *number, 0.0, 0.0, *history, ("coin", "v"))
    counts = fit_categories(np.array([[0], [1]] * 50), (2,))
    return dataclasses.replace(density, schema=Schema(fields, (), "columns"), categories=counts)


def test_marginals_are_those_of_a_gaussian():
    x = np.random.default_rng(0).normal(size=(4, 2))
    marginal = gaussian().marginal(["a", "c"], method="sampling")
    value, error = marginal.log_prob_and_error(x)
    expected = multivariate_normal(MEAN[[0, 2]], COVARIANCE[np.ix_([0, 2], [0, 2])]).logpdf(x)
    assert np.max(np.abs(value - expected) / error) < 4 and np.max(error) < 0.05
    assert marginal.sample(jr.key(0), 7).shape == (7, 2)
    assert gaussian().marginal(np.int64(1)).columns == (1,)
    assert_allclose(
        gaussian().marginal([0, 1, 2]).log_prob(np.zeros((1, 3))), gaussian().log_prob(np.zeros((1, 3))), rtol=1e-9
    )


@pytest.mark.parametrize("columns", [[0, 2], [1]], ids=["one left", "two left"])
def test_marginals_by_quadrature(columns):
    x = MEAN[columns] + np.random.default_rng(0).normal(size=(4, len(columns)))
    value, error = gaussian().marginal(columns, method="quadrature").log_prob_and_error(x)
    expected = multivariate_normal(MEAN[columns], COVARIANCE[np.ix_(columns, columns)]).logpdf(x)
    assert_allclose(value, expected, atol=1e-3)
    assert np.max(error) < 1e-2
    with pytest.raises(ValueError, match="Expected one or two columns of numbers"):
        gaussian(["real", "integer", "real"]).marginal([1], method="quadrature")
    with pytest.raises(ValueError, match="Expected method"):
        gaussian().marginal([0], method="guess")


def test_marginals_of_bounded_and_integer_columns():
    density = gaussian(["positive", "integer", "real"])
    x = np.geomspace(0.01, 40.0, 30)
    expected = norm.logpdf(np.log(x), MEAN[0], np.sqrt(COVARIANCE[0, 0])) - np.log(x)
    assert_allclose(density.marginal("a").log_prob(x), expected, atol=0.15)
    n = np.arange(-6.0, 5.0)
    ends = norm(MEAN[1], np.sqrt(COVARIANCE[1, 1])).cdf([n, n + 1])
    assert_allclose(np.exp(density.marginal("b").log_prob(n)), ends[1] - ends[0], atol=0.03)
    assert density.marginal("b").log_prob([0.5]) == -np.inf and density.marginal("a").log_prob([-1.0]) == -np.inf


def test_draws_given_a_column():
    found = sample_given(gaussian(), {"b": 1.5}, jr.key(0), 2000)
    assert (found.draws[:, 1] == 1.5).all()
    assert found.effective > 1000 and found.acceptance > 0.3
    gain = COVARIANCE[[0, 2], 1] / COVARIANCE[1, 1]
    deviation = np.sqrt(np.diag(COVARIANCE)[[0, 2]] - gain * COVARIANCE[[0, 2], 1])
    z = (found.draws[:, [0, 2]].mean(axis=0) - MEAN[[0, 2]] - gain * 2.5) / deviation * np.sqrt(2000)
    assert np.max(np.abs(z)) < 4
    assert_allclose(found.draws[:, [0, 2]].std(axis=0), deviation, rtol=0.1)


def test_draws_given_an_integer():
    """Against draws of the density that have it."""
    density = gaussian(["count", "real", "positive"])
    draws = density.sample(jr.key(1), 40_000)
    expected = draws[draws[:, 0] == 2][:, [1]]
    found = density.sample_given({"a": 2}, jr.key(0), 2000)[:, [1]]
    error = expected.std() * np.sqrt(1 / len(expected) + 1 / 2000)
    assert abs(found.mean() - expected.mean()) < 4 * error


@pytest.mark.slow
def test_draws_given_numbers_or_categories():
    draws = mixed().sample_given({"v": 2.0}, jr.key(0), 4000)
    assert (draws["v"] == 2.0).all()
    assert abs(np.mean(draws["coin"] == "heads") - 1 / (1 + np.exp(-2.0))) < 0.03
    exact = sample_given(mixed(), {"coin": "tails"}, jr.key(0), 4000)
    assert exact.effective == np.inf and abs(exact.draws["v"].mean()) < 0.08


def test_unknown_levels_are_impossible():
    row = {"coin": ["edge"], "v": [0.0]}
    assert mixed().marginal("coin").log_prob(row) == mixed().marginal(["v", "coin"]).log_prob(row) == -np.inf
    assert mixed().rank(row, jr.key(0)) == 0.0


@pytest.mark.slow
def test_marginals_of_categories():
    assert_allclose(np.exp(mixed().marginal("coin").log_prob({"coin": ["heads", "tails"]})), 0.5)
    v = np.array([0.0, 1.0, 3.0])
    expected = np.log((norm.pdf(v) + norm.pdf(v - 2)) / 2)
    assert_allclose(mixed().marginal("v").log_prob({"v": v}), expected, atol=0.1)


def test_draws_that_cannot_be_trusted_are_warned_of(monkeypatch):
    monkeypatch.setattr("ddnf.density.given._FEWEST_EFFECTIVE", 1e9)
    with pytest.warns(RuntimeWarning, match="The draws given b may be wrong"):
        gaussian().sample_given({"b": 1.5}, jr.key(0), 20)


def test_probability_of_a_box():
    value, error = gaussian().probability({"a": (0.0, None), "b": (-1.0, 9.0)}, jr.key(0), 20_000)
    corners = multivariate_normal(MEAN[:2], COVARIANCE[:2, :2]).cdf([9.0, 9.0], lower_limit=[0.0, -1.0])
    assert abs(value - corners) < 4 * error < 0.02
    assert abs(mixed().probability({"coin": "heads", "v": (2.0, None)}, jr.key(0), 20_000).value - 0.25) < 0.015


def test_ranks_of_outliers():
    ranks = gaussian().rank(np.array([MEAN, MEAN + 2, MEAN + 50]), jr.key(0))
    assert ranks[0] > 0.99 and ranks[2] == 0.0
    fresh = gaussian().rank(gaussian().sample(jr.key(5), 500), jr.key(0))
    assert 0.4 < fresh.mean() < 0.6


def conditional() -> Density:
    flow = AdditiveCondition(lambda c: 2.0 * c, (1,), (1,))
    history = np.zeros(1), np.zeros(1), np.zeros(1)
    return Density(flow, columns_from(None, 1), np.zeros(1), np.eye(1), np.zeros(1), np.ones(1), 0.0, 0.0, *history)


def test_draws_of_some_rows_at_a_time(monkeypatch):
    rng, sizes, sample = np.random.default_rng(0), [], Density.sample_numbers
    given = rng.normal(size=(5, 1))
    x = 2 * given + rng.normal(size=(5, 1))
    exact = norm.cdf(x - 2 * given)
    monkeypatch.setattr("ddnf.density.queries._AT_ONCE", 4000)
    monkeypatch.setattr(Density, "sample_numbers", lambda *args: sizes.append(args[3]) or sample(*args))
    assert_allclose(conditional().pit(x, jr.key(0), given, n=2000), exact, atol=0.05)
    rank = conditional().rank(x, jr.key(0), given, n=2000)
    assert_allclose(rank, 2 * np.minimum(exact, 1 - exact)[:, 0], atol=0.06)
    assert sizes == [4000] * 6
    assert conditional().rank(np.zeros((0, 1)), jr.key(0), np.zeros((0, 1)), n=2000).shape == (0,)


@pytest.mark.slow
def test_calibration_of_conditional_densities():
    rng = np.random.default_rng(0)
    given = rng.normal(size=(400, 1))
    right, wrong = 2 * given + rng.normal(size=(400, 1)), 2 * given + 2 * rng.normal(size=(400, 1))
    density = conditional()
    assert density.pit(right, jr.key(0), given).shape == (400, 1)
    good, bad = (density.calibration(x, jr.key(0), given) for x in (right, wrong))
    assert good.p_values[0] > 0.01 and bad.p_values[0] < 1e-6
    assert_allclose(good.coverage[:, 0], good.levels, atol=0.08)
    ranks = density.rank(right, jr.key(0), given, n=100)
    assert ranks.shape == (400,) and 0.4 < ranks.mean() < 0.6


@pytest.mark.parametrize(
    "table", [None, {"coin": ["heads", "tails"] * 5, "v": np.arange(10.0)}], ids=["draws", "table"]
)
def test_pictures(table, tmp_path):
    figure = mixed().plot(jr.key(0), table)
    figure.savefig(tmp_path / "a.png")
    assert len(figure.axes) == 4
    assert {text.get_text() for text in figure.legends[0].texts} == ({"draws"} if table is None else {"table", "draws"})


BAD = {
    "column": (lambda: gaussian().marginal("z"), r"columns of the density \(a, b, c\); got 'z'"),
    "none": (lambda: gaussian().sample_given({"a": None}, jr.key(0), 5), "a number for column 'a'; got None"),
    "no columns": (lambda: gaussian().plot(jr.key(0), columns=[]), "at least one column to show"),
    "twice": (lambda: gaussian().marginal(["a", "a"]), "columns that differ"),
    "support": (lambda: gaussian("positive").sample_given({"a": -1.0}, jr.key(0), 5), "values in their support"),
    "level": (lambda: mixed().sample_given({"coin": "edge"}, jr.key(0), 5), r"a level of 'coin' \(heads, tails\)"),
    "unseen level": (
        lambda: mixed().pit({"coin": ["edge"], "v": [0.0]}, jr.key(0)),
        r"levels of 'coin' that were seen \(heads, tails\)",
    ),
    "box": (lambda: gaussian().probability({"a": 1.0}, jr.key(0), 10), r"an interval \(low, high\)"),
    "condition": (lambda: conditional().marginal(0), "Expected a condition"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_questions(case):
    ask, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        ask()
