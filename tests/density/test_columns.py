"""Columns: each support to unbounded space and back, with the log-determinant that autodiff finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf.density.columns import Column, columns_from, from_real, outside, to_real

SUPPORTS = {
    "real": "real",
    "positive": "positive",
    "unit": "unit",
    "interval": (-2.0, 5.0),
    "from below": (10.0, None),
    "from above": (None, 3.0),
    "integer": "integer",
    "count": "count",
}
CONTINUOUS = [name for name in SUPPORTS if name not in ("integer", "count")]
POINTS = jnp.linspace(-8.0, 8.0, 33)[:, None]


@pytest.mark.parametrize("name", CONTINUOUS)
def test_there_and_back(name):
    columns = columns_from(SUPPORTS[name], 1)
    assert_allclose(to_real(columns, from_real(columns, POINTS))[0], POINTS, atol=1e-9)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_log_determinant_is_that_of_autodiff(name):
    columns = columns_from(SUPPORTS[name], 1)
    x = from_real(columns, POINTS)
    slopes = jax.vmap(jax.jacobian(lambda x: to_real(columns, x)[0]))(x)[:, 0, 0]
    assert_allclose(to_real(columns, x)[1], jnp.log(slopes), atol=1e-9)


@pytest.mark.parametrize("name", SUPPORTS)
def test_numpy_and_jax_agree(name):
    columns = columns_from(SUPPORTS[name], 1)
    x = np.asarray(from_real(columns, POINTS)) + 0.25 * columns[0].integer
    ours, theirs = to_real(columns, x), to_real(columns, jnp.asarray(x))
    assert isinstance(ours[0], np.ndarray) and isinstance(ours[1], np.ndarray)
    assert_allclose(ours[0], theirs[0], rtol=1e-12)
    assert_allclose(ours[1], theirs[1], rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
@pytest.mark.parametrize("name", SUPPORTS)
def test_draws_stay_in_the_support(name, dtype):
    """Even those so far out that the end of the interval is the nearest number."""
    columns = columns_from(SUPPORTS[name], 1)
    u = jnp.array([-1e3, -100.0, -40.0, -20.0, 0.0, 20.0, 40.0, 80.0], dtype)[:, None]
    x = np.asarray(from_real(columns, u))
    assert x.dtype == dtype
    assert outside(columns, x) is None


def test_integers_are_rounded_down():
    columns = (Column(0.0, 3.0, True), Column(None, None, True))
    u = jnp.stack([jnp.linspace(-9.0, 9.0, 50), jnp.linspace(-2.5, 2.5, 50)], axis=1)
    x = np.asarray(from_real(columns, u))
    assert set(x[:, 0]) == {0.0, 1.0, 2.0, 3.0}
    assert set(x[:, 1]) == {-3.0, -2.0, -1.0, 0.0, 1.0, 2.0}


def test_ways_to_say_it():
    positive, real = Column(0.0), Column()
    assert columns_from(None, 2) == (real, real)
    assert columns_from("positive", 2) == (positive, positive)
    assert columns_from(["positive", "real"], 2) == (positive, real)
    assert columns_from({1: "positive"}, 2) == (real, positive)
    assert columns_from({"b": "positive"}, 2, ["a", "b", "given"]) == (real, positive)
    assert columns_from((0, None), 2) == (positive, positive)  # integers are fine as ends
    assert columns_from((-np.inf, np.inf), 1) == (real,)
    assert columns_from([(0, 2), (None, 1)], 2) == (Column(0.0, 2.0), Column(None, 1.0))


def test_words_of_a_column():
    assert str(Column(0.0, integer=True)) == "integers of (0.0, inf)"
    assert str(Column(None, 2.0)) == "(-inf, 2.0)"


@pytest.mark.parametrize(
    ("column", "values", "is_fine"),
    [
        (Column(0.0), [1e-300], True),
        (Column(0.0), [0.0], False),
        (Column(0.0, 1.0), [0.5], True),
        (Column(0.0, 1.0), [1.0], False),
        (Column(None, 1.0), [1.5], False),
        (Column(0.0, integer=True), [0.0, 7.0], True),
        (Column(0.0, integer=True), [-1.0], False),
        (Column(0.0, integer=True), [0.5], False),
        (Column(0.0, 3.0, True), [3.0], True),
        (Column(0.0, 3.0, True), [4.0], False),
    ],
)
def test_what_lies_outside(column, values, is_fine):
    complaint = outside((Column(), column), np.stack([np.zeros(len(values)), values], axis=1))
    assert complaint is None if is_fine else "column 1 has values" in str(complaint)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("support", "message"),
    [
        ("negative", "Expected a support of real, .*; got 'negative'"),
        (["real"], r"Expected a support for each of 2 columns; got \['real'\]"),
        (["real", "real", "real"], "Expected a support for each of 2 columns"),
        ([], "Expected a support for each of 2 columns"),
        (["real", 3], "Expected a support of real"),
        (7, "Expected a support for each of 2 columns; got 7"),
        ({2: "positive"}, "Expected column numbers from 0 to 1 in support; got 2"),
        ({-1: "positive"}, "Expected column numbers"),
        ({"price": "positive"}, "Expected column numbers from 0 to 1 in support; got 'price'"),
        ({True: "positive"}, "Expected column numbers"),
        ({0: "odd"}, "Expected a support of real"),
        ((1.0, 1.0), "Expected an interval with low < high"),
        ((2.0, 1.0), "Expected an interval with low < high"),
        ((np.nan, 1.0), "Expected an interval"),
        ((np.inf, None), "Expected an interval"),
        ((0.0, 1.0, 2.0), "Expected a support"),
        (("a", "b"), "Expected a support of real"),
    ],
)
def test_bad_supports(support, message):
    with pytest.raises(ValueError, match=message) as error:
        columns_from(support, 2)
    assert "\n" not in str(error.value)


def test_names_that_are_not_there():
    with pytest.raises(ValueError, match="or names of a, b in support; got 'given'"):
        columns_from({"given": "positive"}, 2, ["a", "b", "given"])
