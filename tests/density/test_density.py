"""Densities: they integrate to one, say what their draws do, learn from the training rows only, refuse bad input."""

import dataclasses
import re
from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import Affine, Invert
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import norm

import ddnf
from ddnf import DDNF, Density, fit_density
from ddnf.density.columns import columns_from, from_real, outside
from ddnf.density.rows import check_far

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(60, 2)) @ [[1.0, 0.5], [0.0, 0.8]] + [3.0, -1.0]


def small_flow(dim=2, condition_dim=None, **options):
    return Invert(DDNF(jr.key(3), dim, blocks=1, steps=2, hidden=(4,), condition_dim=condition_dim, **options))


def by_hand(support, dim, condition_dim=None):
    """A density that nobody has fitted, far from normal."""
    scale = np.tril(RNG.normal(size=(dim, dim)) / 3, -1) + np.diag(np.linspace(0.7, 0.5, dim))
    given = (None, None) if condition_dim is None else (np.zeros(condition_dim), np.ones(condition_dim))
    flow = small_flow(dim, condition_dim, output_scale=1.0)
    columns = columns_from(support, dim)
    return Density(flow, columns, np.full(dim, 0.3), scale, *given, 0.0, 0.0, np.zeros(1), np.zeros(1), np.zeros(1))


def quick_fit(x, condition=None, *, key=0, **options):
    flow = small_flow(np.shape(x)[1], None if condition is None else np.shape(condition)[1])
    return fit_density(jr.key(key), x, condition, **dict(flow=flow, steps=20, progress=False) | options)


@cache
def fitted():
    return quick_fit(ROWS)


# Integrals, and the map from normal draws


@pytest.mark.parametrize("support", ["real", "positive", "unit", (-2.0, 5.0), (None, 3.0), (10.0, None)], ids=str)
def test_integrates_to_one(support):
    density = by_hand(support, 1)
    x = np.asarray(from_real(density.columns, jnp.linspace(-12.0, 12.0, 20_001)[:, None]))
    assert_allclose(np.trapezoid(np.exp(density.log_prob(x)), x[:, 0]), 1.0, atol=1e-4)


def test_integrates_to_one_in_the_plane():
    density = by_hand(["positive", (-1.0, 1.0)], 2)
    x = np.asarray(from_real(density.columns, jnp.tile(jnp.linspace(-10.0, 10.0, 401)[:, None], 2)))
    grid = np.stack(np.meshgrid(x[:, 0], x[:, 1], indexing="ij"), axis=-1)
    inner = np.trapezoid(np.exp(density.log_prob(grid)), x[:, 1], axis=1)
    assert_allclose(np.trapezoid(inner, x[:, 0]), 1.0, atol=1e-3)


@pytest.mark.parametrize("support", ["integer", "count"])
def test_probabilities_of_integers_sum_to_one(support):
    density = by_hand(support, 1)
    assert_allclose(np.sum(np.exp(density.log_prob(np.arange(-200.0, 201.0)[:, None]))), 1.0, atol=0.02)


def test_integers_beside_a_real_column():
    density = by_hand(["count", "real"], 2)
    reals = np.linspace(-6.0, 6.0, 101)
    grid = np.stack(np.meshgrid(np.arange(100.0), reals, indexing="ij"), axis=-1)
    assert_allclose(np.sum(np.trapezoid(np.exp(density.log_prob(grid)), reals, axis=1)), 1.0, atol=0.02)


def test_integers_are_drawn_as_often_as_they_are_probable():
    density = by_hand("count", 1)
    draws, n = np.asarray(density.sample(jr.key(0), 4000)), np.arange(6.0)
    probability = np.exp(density.log_prob(n[:, None]))
    z = (np.mean(draws == n, axis=0) - probability) / np.sqrt(probability * (1 - probability) / len(draws))
    assert np.max(np.abs(z)) < 4


@pytest.mark.parametrize(("dim", "condition_dim"), [(1, None), (3, None), (2, 2)])
def test_change_of_variables(dim, condition_dim):
    density = by_hand((["positive", "unit", "real"])[:dim], dim, condition_dim)
    condition = None if condition_dim is None else jnp.array([0.5, -1.0])

    def draw(z):
        return from_real(density.columns, density.mean + density.scale @ density.flow.transform(z, condition))

    z = jr.normal(jr.key(1), (5, dim))
    x, jacobians = jax.jit(jax.vmap(lambda z: (draw(z), jax.jacfwd(draw)(z))))(z)
    expected = np.sum(norm.logpdf(z), axis=1) - np.linalg.slogdet(jacobians)[1]
    assert_allclose(density.log_prob(x, condition), expected, atol=1e-6)


def test_log_prob_can_be_differentiated():
    density = by_hand(["positive", "real"], 2)
    x, step = jnp.array([1.2, 0.4]), jnp.array([1e-5, 0.0])
    slope = (density.log_prob(x + step) - density.log_prob(x - step)) / 2e-5
    assert_allclose(jax.jit(jax.grad(density.log_prob))(x)[0], slope, rtol=1e-5)
    assert np.isfinite(jax.grad(density.log_prob)(jnp.array([-1.0, 0.4]))).all()


def test_draws_lie_in_the_support():
    density = by_hand(["positive", "unit", (-2.0, 5.0), "count", "integer"], 5)
    x = density.sample(jr.key(0), 2000)
    assert x.shape == (2000, 5)
    assert outside(density.columns, np.asarray(x)) is None
    assert np.isfinite(density.log_prob(x)).all()


@pytest.mark.parametrize("bad", [[-1.0, 0.5], [0.0, 0.5], [1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], ids=str)
def test_nothing_outside_of_the_support(bad):
    assert by_hand(["positive", "unit"], 2).log_prob(bad) == -jnp.inf


@pytest.mark.parametrize("between", [0.5, 2.5, -0.5])
def test_nothing_between_the_integers(between):
    assert by_hand("count", 1).log_prob([between]) == -jnp.inf


def test_batches_of_any_shape():
    density = by_hand("real", 2)
    x = RNG.normal(size=(3, 4, 2))
    flat = density.log_prob(x.reshape(-1, 2))
    assert density.log_prob(x[0, 0]).shape == ()
    assert_allclose(density.log_prob(x), flat.reshape(3, 4), rtol=1e-12)
    assert_allclose(density.log_prob(jnp.asarray(x)), flat.reshape(3, 4), rtol=1e-12)


def test_a_condition_for_all_rows_or_one_for_each():
    density = by_hand("real", 2, 1)
    x, given = RNG.normal(size=(3, 2)), np.array([[0.0], [1.0], [-2.0]])
    each = density.log_prob(x, given)
    assert_allclose(each[1], density.log_prob(x[1], [1.0]), rtol=1e-12)
    assert_allclose(density.log_prob(x, [1.0])[1], each[1], rtol=1e-12)
    assert abs(density.log_prob(x, [1.0])[0] - each[0]) > 1e-3
    draws = density.sample(jr.key(0), condition=given)
    assert draws.shape == (3, 2)
    assert_allclose(draws[1], density.sample(jr.key(0), 3, condition=[1.0])[1], rtol=1e-9)


def test_far_from_the_origin_in_single_precision():
    """Seconds since 1970: single precision has steps of 128 there."""
    with jax.enable_x64(False):
        density = by_hand("real", 1)
        far = dataclasses.replace(density, mean=density.mean + 1.7e9)
        x = np.array([[1.0], [2.0]])
        assert_allclose(far.log_prob(x + 1.7e9), density.log_prob(x), rtol=1e-4)
        near, draws = np.asarray(density.sample(jr.key(0), 50)), np.asarray(far.sample(jr.key(0), 50))
        assert_allclose(draws - 1.7e9, near, atol=1e-3)
        whole = dataclasses.replace(far, columns=columns_from("integer", 1), scale=100 * far.scale)
        assert len(np.unique(whole.sample(jr.key(0), 50))) > 30


# Fits


def test_learns_a_normal():
    """A normal fitted in closed form has nearly the same likelihood."""
    entropy = 0.5 * np.log(np.linalg.det(np.cov(ROWS.T))) + np.log(2 * np.pi) + 1.0
    assert_allclose(np.mean(fitted().log_prob(ROWS)), -entropy, atol=0.1)


@pytest.mark.slow
def test_learns_a_conditional_mean():
    given = RNG.uniform(-1.0, 1.0, size=(600, 1))
    x = 2.0 * given + 0.3 * RNG.normal(size=(600, 1))
    flow = Invert(DDNF(jr.key(0), 1, blocks=2, steps=2, hidden=(8,), condition_dim=1))
    density = quick_fit(x, given, flow=flow, steps=300, learning_rate=0.02)
    for value in (-0.7, 0.0, 0.7):
        draws = np.asarray(density.sample(jr.key(1), 400, condition=[value]))
        assert abs(draws.mean() - 2.0 * value) < 0.15
        assert draws.std() < 0.5
    assert density.log_likelihood > -0.7  # without the condition it would be about -1.6


@pytest.mark.slow
def test_learns_counts():
    density = quick_fit(RNG.poisson(4.0, size=(500, 1)), support="count", steps=40)
    n = np.arange(60.0)
    probability = np.exp(density.log_prob(n[:, None]))
    assert_allclose(np.sum(probability), 1.0, atol=0.02)
    assert abs(np.sum(n * probability) - 4.0) < 0.5


def test_same_key_same_fit():
    assert_array_equal(quick_fit(ROWS).log_prob(ROWS), fitted().log_prob(ROWS))
    assert not np.array_equal(quick_fit(ROWS, key=1).log_prob(ROWS), fitted().log_prob(ROWS))


def test_units_do_not_matter():
    """Rows in other units give the same fit, and the density of the other units."""
    unit = np.array([1000.0, 0.001])
    shifted = quick_fit(ROWS * unit + 5.0)
    assert_allclose(shifted.log_prob(ROWS * unit + 5.0), fitted().log_prob(ROWS), atol=1e-4)


def test_held_out_rows_are_not_trained_on():
    x, changed = ROWS[:20], []
    start = jax.tree.leaves(eqx.filter(quick_fit(x, validation=4, steps=5).flow, eqx.is_inexact_array))
    for row in range(20):
        other = quick_fit(x + 0.01 * (np.arange(20) == row)[:, None], validation=4, steps=5)
        leaves = jax.tree.leaves(eqx.filter(other.flow, eqx.is_inexact_array))
        changed.append(any(not np.array_equal(a, b) for a, b in zip(start, leaves, strict=True)))
    assert sum(changed) == 16


@pytest.mark.filterwarnings("ignore:The flow folds")  # so large a learning rate
def test_stops_early_and_keeps_the_best():
    # Without folds and with a moderate rate, the fit does not hang on rounding, which differs between releases of JAX.
    flow = Invert(DDNF(jr.key(0), 2, blocks=1, steps=8, hidden=(32,), output_scale=0.5))
    density = quick_fit(ROWS[:20], flow=flow, steps=5000, learning_rate=0.03, patience=2, validation=0.3)
    values = np.asarray(density.values)
    assert len(values) < 50
    assert len(values) - 1 - np.argmin(values) == 2
    # Values are those of standardized rows; the rest is the constant of the standardization.
    constant = np.sum(np.log(np.diag(density.scale)))
    chosen_and_judged_by_the_same_rows = -values.min() - constant
    assert density.log_likelihood < chosen_and_judged_by_the_same_rows + 1e-6
    assert density.train_log_likelihood > density.log_likelihood + 1


def test_with_nans_debugged():
    """Training and validation compute no NaN of their own."""
    with jax.debug_nans(True):
        assert np.isfinite(quick_fit(ROWS, steps=2).log_likelihood)


def test_saved_and_loaded(tmp_path):
    named = dataclasses.replace(fitted(), names=("width", "höhe"))
    named.save(tmp_path / "model.ddnf")
    loaded = ddnf.load(tmp_path / "model.ddnf")
    assert isinstance(loaded, Density)
    assert loaded.names == named.names and loaded.columns == named.columns
    assert (loaded.log_likelihood, loaded.train_log_likelihood) == (named.log_likelihood, named.train_log_likelihood)
    assert_array_equal(loaded.losses, named.losses)
    assert_array_equal(loaded.log_prob(ROWS), named.log_prob(ROWS))
    assert_array_equal(loaded.sample(jr.key(0), 5), named.sample(jr.key(0), 5))


def test_conditional_one_saved_and_loaded(tmp_path):
    density = by_hand(["count", (0.0, None)], 2, 1)
    density.save(tmp_path / "model.ddnf")
    loaded = ddnf.load(tmp_path / "model.ddnf")
    assert isinstance(loaded, Density)
    assert (loaded.columns, loaded.condition_dim) == (density.columns, 1)
    assert_array_equal(loaded.sample(jr.key(0), 5, [1.0]), density.sample(jr.key(0), 5, [1.0]))


@pytest.mark.parametrize("validation", [0.1, 6, np.int64(6), np.float32(0.1)], ids=repr)
def test_share_or_number_of_held_out_rows(validation):
    assert np.isfinite(quick_fit(ROWS, validation=validation).log_likelihood)


def test_tables_of_any_kind():
    expected = fitted().log_prob(ROWS)
    for x in (ROWS.tolist(), jnp.asarray(ROWS), ROWS.astype(object)):
        assert_allclose(quick_fit(x).log_prob(ROWS), expected, rtol=1e-9)


@pytest.mark.parametrize("condition", [None, ROWS[:, :1] ** 2], ids=["alone", "condition"])
def test_folds_are_warned_of_and_kept(condition, tmp_path):
    folding = small_flow(condition_dim=None if condition is None else 1, output_scale=40.0)
    with pytest.warns(RuntimeWarning, match="of the flow.s cells folds on held-out rows"):
        density = quick_fit(ROWS, condition, flow=folding, steps=1, learning_rate=1e-9)
    density.save(tmp_path / "model.ddnf")
    loaded = ddnf.load(tmp_path / "model.ddnf")
    assert isinstance(loaded, Density) and loaded.issues == density.issues != ()
    assert fitted().issues == ()


def test_likelihood_of_the_held_out_rows():
    """Exact, with its standard error and number of rows; all of it is printed."""
    density = quick_fit(ROWS, validation=20, names=("width", "height"))
    assert (density.train_rows, density.held_out_rows) == (40, 20)
    constant = np.sum(np.log(np.diag(density.scale)))
    assert_allclose(density.log_likelihood, -density.values.min() - constant, rtol=1e-9)  # one chunk: no choice
    assert 0.5 < density.log_likelihood_error * np.sqrt(20) / np.std(density.log_prob(ROWS)) < 2
    text = str(density)
    assert text.count("\n") == 2
    assert f"{density.log_likelihood:.6g} +- {density.log_likelihood_error:.2g} on 20 held-out rows" in text
    assert "width: (-inf, inf), height: (-inf, inf)" in text and "40 rows" in text


ISSUES = {
    "counts beside a real column": (
        lambda: np.stack([ROWS[:, 0], np.floor(3 * np.abs(ROWS[:, 1]))], axis=1),
        "Column 1 has .* all integers.*Use support={1: 'count'}",
    ),
    "a column twice": (
        lambda: np.stack([ROWS[:, 0], ROWS[:, 1], 1 - 2 * ROWS[:, 0]], axis=1),
        "Column 2 is an exact linear function of column 0: .*Drop the column",
    ),
    "one huge cell": (lambda: changed(7, 1, 1e30), r"Column 1 has 1 values .* the farthest is 1e\+30.*Clip or drop"),
    "repeated rows": (lambda: np.concatenate([ROWS[:30], ROWS[:30]]), "50% of the rows are duplicates"),
}


@pytest.mark.parametrize("case", ISSUES)
def test_faults_of_a_table_are_warned_of_and_kept(case):
    make, message = ISSUES[case]
    with pytest.warns(RuntimeWarning, match=message):
        density = quick_fit(make(), steps=2)
    assert len(density.issues) == 1 and re.match(message, density.issues[0])
    assert np.isfinite(density.log_likelihood)
    with pytest.warns(DeprecationWarning, match="use Density.issues"):
        assert density.complaints == density.issues


# Bad input


def fit(x=ROWS, condition=None, **options):
    return fit_density(jr.key(0), x, condition, **dict(progress=False, steps=10) | options)


def changed(row, column, value):
    x = ROWS.copy()
    x[row, column] = value
    return x


CONSTANT = np.stack([ROWS[:, 0], np.ones(60)], axis=1)
GIVEN = np.ones((60, 3)) * np.arange(60)[:, None]
BAD = {
    "NaN": (lambda: fit(changed(7, 1, np.nan)), "NaN or infinity in 1 rows, the first is row 7"),
    "infinity": (lambda: fit(changed(0, 0, -np.inf)), "NaN or infinity in 1 rows, the first is row 0"),
    "None": (lambda: fit([[None, 1.0]] * 20), "Expected x to be a table of numbers|Expected finite x"),
    "one row": (lambda: fit(ROWS[:1]), "Expected at least 10 rows; got 1"),
    "nine rows": (lambda: fit(ROWS[:9]), "Expected at least 10 rows; got 9"),
    "no rows": (
        lambda: fit(ROWS[:0]),
        r"Expected x of shape \(rows, columns\), with at least one of each; got \(0, 2\)",
    ),
    "no columns": (lambda: fit(ROWS[:, :0]), r"with at least one of each; got \(60, 0\)"),
    "nothing": (lambda: fit(None), "Expected x"),
    "a number": (lambda: fit(3.0), r"Expected x of shape \(rows, columns\).*; got \(\)"),
    "constant": (lambda: fit(CONSTANT), "Expected columns that vary; column 1 has one value only"),
    "words": (lambda: fit([["a", "b"]] * 20), "Expected x to be a table of numbers"),
    "ragged": (lambda: fit([[1.0, 2.0], [3.0]] * 10), "Expected x to be a table of numbers"),
    "complex": (lambda: fit(ROWS + 1j), "Expected x to be a table of numbers"),
    "line": (lambda: fit(ROWS[:, 0]), r"got \(60,\): for one column write x\[:, None\]"),
    "huge": (lambda: fit(ROWS * 1e300), "those of column 0 differ by .*: use another unit"),
    "tiny condition": (lambda: fit(condition=GIVEN * 1e-200), "those of condition 0 differ by .*: use another unit"),
    "times": (lambda: fit(np.array([["2020-01-01"]] * 20, "datetime64[D]")), "dates and times are understood in"),
    "masked": (lambda: fit(np.ma.masked_greater(ROWS, 1.0)), "NaN or infinity"),
    "cube": (lambda: fit(ROWS.reshape(15, 4, 2)), r"got \(15, 4, 2\)"),
    "too few to train": (lambda: fit(ROWS[:12], validation=8), "Expected at least 5 rows to train on; got 12 rows, 8"),
    "all held out": (lambda: fit(validation=60), "Expected at least 5 rows to train on"),
    "validation 0": (lambda: fit(validation=0.0), "Expected validation to be a share between 0 and 1"),
    "validation < 0": (lambda: fit(validation=-0.1), "Expected validation to be a share"),
    "validation NaN": (lambda: fit(validation=np.nan), "Expected validation to be a share"),
    "validation 1.0": (lambda: fit(validation=1.0, flow=small_flow()), "Expected"),
    "validation 2.5": (lambda: fit(validation=2.5, flow=small_flow()), "Expected validation to be a share"),
    "validation word": (lambda: fit(validation="some"), "Expected validation to be a share"),
    "validation truth": (lambda: fit(validation=True), "Expected validation to be a share"),
    "short condition": (lambda: fit(condition=GIVEN[:9]), "Expected a condition for each of 60 rows; got 9"),
    "flat condition": (lambda: fit(condition=GIVEN[:, 0]), r"Expected condition of shape \(rows, columns\)"),
    "NaN condition": (lambda: fit(condition=GIVEN * np.nan), "Expected finite condition"),
    "words as condition": (lambda: fit(condition=[["a"]] * 60), "Expected condition to be a table of numbers"),
    "constant condition": (
        lambda: fit(condition=np.ones((60, 1)), flow=small_flow(2, 1)),
        "Expected condition.* var",
    ),
    "unknown support": (lambda: fit(support="negative"), "Expected a support of real, .*; got 'negative'"),
    "long support": (lambda: fit(support=["real"] * 3), "Expected a support for each of 2 columns"),
    "support of no column": (lambda: fit(support={5: "real"}), "Expected column numbers from 0 to 1"),
    "outside of it": (lambda: fit(support="unit"), r"Expected x in its support; column 0 has values outside of \(0.0"),
    "not integers": (lambda: fit(support={1: "integer"}), "column 1 has values that are not integers"),
    "negative count": (lambda: fit(np.floor(ROWS), support="count"), "has values outside of integers of"),
    "steps": (lambda: fit(steps=0), "Expected steps to be an integer of at least 1; got 0"),
    "half steps": (lambda: fit(steps=2.5), "Expected steps"),
    "words for steps": (lambda: fit(steps="10"), "Expected steps"),
    "batch": (lambda: fit(batch=0), "Expected batch to be an integer of at least 1; got 0"),
    "patience": (lambda: fit(patience=0), "Expected patience to be an integer of at least 1; got 0"),
    "learning_rate": (lambda: fit(learning_rate=0.0), "Expected a positive learning_rate; got 0.0"),
    "learning_rate < 0": (lambda: fit(learning_rate=-1e-3), "Expected a positive learning_rate"),
    "learning_rate NaN": (lambda: fit(learning_rate=np.nan), "Expected a positive learning_rate; got nan"),
    "learning_rate inf": (
        lambda: fit(learning_rate=np.inf, flow=small_flow()),
        "Expected a positive.* learning_rate; got inf",
    ),
    "seed for a key": (lambda: fit_density(0, ROWS), "Expected a random key such as jax.random.key.0.; got 0"),
    "seed for a draw": (lambda: by_hand("real", 2).sample(0, 3), "Expected a random key"),
    "names": (lambda: fit(names=["a"]), "Expected 2 names; got"),
    "flow of 3": (lambda: fit(flow=small_flow(3)), r"Expected a flow of shape \(2,\) and condition None; got \(3,\)"),
    "flow's condition": (lambda: fit(flow=small_flow(2, 1)), r"Expected a flow .*; got \(2,\), \(1,\)"),
    "flow without": (lambda: fit(condition=GIVEN, flow=small_flow(2)), r"Expected a flow .* condition \(3,\); got"),
    "scalar flow": (lambda: fit(flow=Affine()), r"Expected a flow of shape \(2,\)"),
    "no bijection": (lambda: fit(flow=jnp.sin), "Expected flow to be a FlowJAX bijection"),
    "log_prob: width": (lambda: by_hand("real", 2).log_prob(np.ones((5, 3))), r"Expected x of shape \(..., 2\)"),
    "log_prob: number": (lambda: by_hand("real", 2).log_prob(1.0), r"Expected x of shape \(..., 2\); got \(\)"),
    "log_prob: words": (lambda: by_hand("real", 2).log_prob(["a", "b"]), "Expected x to be a table of numbers"),
    "log_prob: complex": (lambda: by_hand("real", 2).log_prob(ROWS * 1j), "Expected x to be a table of numbers"),
    "log_prob: traced": (lambda: jax.jit(by_hand("real", 2).log_prob)(jnp.ones((4, 3))), r"Expected x of shape"),
    "log_prob: condition": (lambda: by_hand("real", 2).log_prob(ROWS, GIVEN), "Expected no condition; got one"),
    "log_prob: no condition": (lambda: by_hand("real", 2, 1).log_prob(ROWS), "Expected a condition of 1 numbers"),
    "log_prob: wide condition": (
        lambda: by_hand("real", 2, 1).log_prob(ROWS, GIVEN),
        r"Expected condition.* 1\); got \(60, 3\)",
    ),
    "log_prob: short condition": (lambda: by_hand("real", 2, 3).log_prob(ROWS, GIVEN[:7]), "Expected conditions of"),
    "log_prob: word condition": (lambda: by_hand("real", 2, 1).log_prob(ROWS, ["a"]), "Expected condition"),
    "log_prob: NaN": (
        lambda: by_hand("real", 2).log_prob([[1.0, np.nan]]),
        r"no missing values; got some in columns 1 \(1\). Leave these rows out",
    ),
    "pit: NaN": (lambda: by_hand("real", 2).pit([[np.nan, 1.0]], jr.key(0)), "some in columns 0"),
    "marginal: NaN": (lambda: by_hand("real", 2).marginal(1).log_prob([np.nan]), "some in columns 1"),
    "log_prob: NaN condition": (lambda: by_hand("real", 2, 1).log_prob(ROWS, [np.nan]), "Expected finite condition"),
    "sample: none": (
        lambda: by_hand("real", 2).sample(jr.key(0), 0),
        "Expected n to be an integer .*; got 0",
    ),
    "sample: half": (lambda: by_hand("real", 2).sample(jr.key(0), 2.5), "Expected n .*; got 2.5"),
    "sample: condition": (lambda: by_hand("real", 2, 1).sample(jr.key(0), 3), "Expected a condition of 1 numbers"),
    "sample: lengths": (lambda: by_hand("real", 2, 3).sample(jr.key(0), 3, GIVEN), "Expected conditions of shape"),
}


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("case", BAD)
def test_one_clear_line(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_values_that_single_precision_cannot_hold():
    with pytest.raises(ValueError, match=r"column 'b' has 1e\+60: drop it"):
        check_far(changed(3, 1, 1e60), changed(3, 1, 1e60), ["a", "b"])


def test_files_that_cannot_be(tmp_path):
    (tmp_path / "damaged.ddnf").write_bytes(b"\0" * 100)
    with pytest.raises(OSError, match="Could not write the file"):
        by_hand("real", 1).save(tmp_path / "nowhere" / "model.ddnf")
    with pytest.raises(OSError, match="folder"):
        by_hand("real", 1).save(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        ddnf.load(tmp_path / "missing.ddnf")
    with pytest.raises(ValueError, match="Expected a ddnf model file"):
        ddnf.load(tmp_path / "damaged.ddnf")
