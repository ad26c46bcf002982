"""Many rows: sums in chunks, subsamples corrected to second order, and fits that are judged by all rows."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddnf
from ddnf.posterior import rows as rows_module
from ddnf.posterior import tall
from ddnf.posterior.curvature import Derivatives
from ddnf.posterior.gaussian import best_gaussian
from ddnf.posterior.programs import Programs
from ddnf.posterior.rows import sum_in_chunks
from ddnf.posterior.subsample import Expansion, rows_needed, subsample

RNG = np.random.default_rng(0)
N = 1001
X = RNG.normal(size=(N, 3))
Y = (RNG.uniform(size=N) < 1 / (1 + np.exp(-X @ [0.5, -1.0, 0.3]))).astype(float)


def prior(z):
    return -jnp.sum(z**2) / 8


def likelihood(z, row):
    x, y = row
    return y * (x @ z) - jax.nn.softplus(x @ z)


def total(z):
    return prior(z) + jnp.sum(jax.vmap(likelihood, (None, 0))(z, (jnp.asarray(X), jnp.asarray(Y))))


@pytest.fixture
def logistic(monkeypatch):
    """A regression in chunks that do not divide its rows."""
    monkeypatch.setattr(rows_module, "CHUNK", 128)
    return ddnf.Target(prior, 3, rows=(X, Y), log_likelihood=likelihood)


def expansion(target, point):
    derivatives = Derivatives(target.programs)
    value, gradient = derivatives.value_and_gradient(point)
    hessian = derivatives.hessian(point)
    assert hessian is not None
    return Expansion(point, value, gradient, hessian, np.linalg.cholesky(np.linalg.inv(-hessian)))


def mode(target):
    return tall._climb(Derivatives(target.programs), np.zeros(target.dim), np.eye(target.dim) / 20)


def test_programs_see_every_row_once(logistic):
    z = RNG.normal(size=(11, 3))
    plain = Programs(total, 3)
    assert_allclose(logistic.programs.values(z), plain.values(z))
    assert_allclose(logistic.programs.gradients(z)[1], plain.gradients(z)[1], atol=1e-9)
    assert_allclose(logistic.programs.gradient(z[0])[0], plain.gradient(z[0])[0])
    assert_allclose(logistic.programs.hessian(z[0]), plain.hessian(z[0]), atol=1e-9)
    assert_allclose(logistic.log_density(jnp.asarray(z[0])), total(jnp.asarray(z[0])))


def test_sums_in_chunks_have_the_same_gradients(monkeypatch):
    monkeypatch.setattr(rows_module, "CHUNK", 64)
    rows, offsets = (jnp.asarray(X), jnp.asarray(Y)), jnp.asarray(RNG.normal(size=N))

    def batch(z, rows):
        return jax.vmap(likelihood, (None, 0))(z, rows)

    z = jnp.asarray(RNG.normal(size=3))
    chunked, whole = (
        jax.value_and_grad(f)(z)
        for f in (lambda z: sum_in_chunks(batch, z, rows, offsets), lambda z: jnp.sum(batch(z, rows) - offsets))
    )
    assert_allclose(chunked[0], whole[0])
    assert_allclose(chunked[1], whole[1])


def test_rows_on_disk_are_the_same_rows(tmp_path):
    for name, array in (("x", X), ("y", Y)):
        np.save(tmp_path / f"{name}.npy", array)
    mapped = tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("x", "y"))
    target = ddnf.Target(prior, 3, rows=mapped, log_likelihood=likelihood)
    assert_allclose(target.programs.values(np.ones((1, 3))), Programs(total, 3).values(np.ones((1, 3))))
    picked = np.array([7, 3, 900, 3])
    assert target.rows is not None
    assert_allclose(target.rows.take(picked)[0], X[picked])


def test_parquet_files_are_rows_on_disk(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"x": X[:, 0], "y": Y.astype(float)}
    for name, part in (("a", slice(0, 700)), ("b", slice(700, None))):
        table = arrow.table({key: column[part] for key, column in columns.items()})
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=300)

    def density(z, row):
        return row["y"] * z[0] * row["x"] - jnp.logaddexp(0.0, z[0] * row["x"])

    on_disk, in_memory = (ddnf.Target(prior, 3, rows=rows, log_likelihood=density) for rows in (tmp_path, columns))
    points = np.random.default_rng(0).normal(size=(2, 3))
    assert_allclose(on_disk.programs.values(points), in_memory.programs.values(points))
    assert on_disk.rows is not None and on_disk.rows.count == len(Y)
    picked = np.array([len(Y) - 1, 3, 701, 3, 299, 300])
    assert_allclose(on_disk.rows.take(picked)["x"], X[picked, 0])
    parquet.write_table(arrow.table({"x": ["text"], "y": [1.0]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="numbers in column 'x'"):
        ddnf.Target(prior, 3, rows=tmp_path / "c.parquet", log_likelihood=density)


def test_a_subsample_is_exact_to_second_order(logistic):
    at = expansion(logistic, np.array([0.4, -0.9, 0.2]))
    few = subsample(logistic, np.arange(100), at)
    value, gradient = few.programs.gradient(at.point)
    assert_allclose(value, 0.0, atol=1e-9)
    assert_allclose(gradient, at.gradient, atol=1e-8)
    assert_allclose(few.programs.hessian(at.point), at.hessian, atol=1e-7)


def test_corrections_end_where_they_would_outweigh_the_tails(logistic):
    at = expansion(logistic, mode(logistic))
    few, far = subsample(logistic, np.arange(60), at), 1e4 * np.eye(3)
    slopes = few.programs.values(2 * far) - few.programs.values(far)
    assert (slopes < 0).all()


def test_rows_needed_predicts_the_noise(logistic):
    at = expansion(logistic, mode(logistic))
    rng, count = np.random.default_rng(1), 50
    wanted, _ = rows_needed(rng, logistic, at, noise=0.05)
    z = at.point + rng.normal(size=(40, 3)) @ at.scale.T
    exact = logistic.programs.values(z) - at.value
    subsamples = [subsample(logistic, rng.choice(N, count, replace=False), at) for _ in range(10)]
    errors = [few.programs.values(z) - exact for few in subsamples]
    predicted = 0.05 * np.sqrt(wanted / count)
    assert 0.5 < np.sqrt(np.mean(np.square(errors))) / predicted < 2


def test_the_best_gaussian_has_the_smallest_divergence():
    skewed = Programs(lambda z: jnp.sum(3 * z - jnp.exp(z)) - (z[0] - z[1]) ** 2, 2)
    start = np.full(2, np.log(3.0)), np.eye(2) / 2
    mean, scale, _ = best_gaussian(np.random.default_rng(0), skewed, *start)
    # At the optimum E[grad log p] = 0 and E[hessian log p] = -covariance^-1.
    z = mean + np.random.default_rng(1).normal(size=(20_000, 2)) @ scale.T
    assert_allclose(skewed.gradients(z)[1].mean(axis=0), 0.0, atol=0.06)
    hessian = np.mean([skewed.hessian(point) for point in z[:2000]], axis=0)
    assert_allclose(-hessian @ scale @ scale.T, np.eye(2), atol=0.2)


def normal_rows(n):
    y = np.random.default_rng(3).normal(1.5, 1.0, size=(n, 2))
    return y, ddnf.Target(
        lambda z: -jnp.sum(z**2) / 2 - jnp.log(2 * jnp.pi),
        2,
        rows=y,
        log_likelihood=lambda z, y: -jnp.sum((y - z) ** 2) / 2 - jnp.log(2 * jnp.pi),
    )


@pytest.mark.slow
def test_a_tall_fit_is_that_of_all_rows():
    n = 30_000
    y, target = normal_rows(n)
    posterior = ddnf.fit_posterior(jr.key(0), target, progress=False)
    mean, deviation = y.sum(axis=0) / (n + 1), (n + 1) ** -0.5
    draws = np.asarray(posterior.sample(jr.key(1), 4000))
    assert_allclose((draws.mean(axis=0) - mean) / deviation, 0.0, atol=0.06)
    assert_allclose(draws.std(axis=0) / deviation, 1.0, atol=0.05)
    square = np.sum(y**2) - (n / (n + 1)) * n * np.sum(y.mean(axis=0) ** 2)
    evidence = -n * np.log(2 * np.pi) - square / 2 - np.log(n + 1)
    assert abs(posterior.log_evidence - evidence) < 0.01
    assert posterior.log[0].stage == "expand" and posterior.log[-1].stage == "all rows"
    assert posterior.target is target and not posterior.issues


@pytest.mark.slow
def test_a_subsample_that_is_not_enough_is_enlarged(monkeypatch):
    """A pilot that promises too much costs a second fit, never a wrong result."""
    monkeypatch.setattr(tall, "SMALLEST", 500)
    monkeypatch.setattr(tall, "_FEWEST", (8, 1))
    monkeypatch.setattr(tall, "rows_needed", lambda *_: (8, None))
    monkeypatch.setattr(tall, "near_gaussian", lambda *_: None)
    target = ddnf.Target(prior, 3, rows=(X, Y), log_likelihood=likelihood)
    posterior = ddnf.fit_posterior(jr.key(0), target, progress=False)
    judged = [row for row in posterior.log if row.stage == "all rows"]
    assert len(judged) > 1 and judged[-1].decision == "return"
    whole = ddnf.fit_posterior(jr.key(0), ddnf.Target(total, 3), progress=False)
    few, all_rows = (np.asarray(p.sample(jr.key(1), 4000)) for p in (posterior, whole))
    assert_allclose((few.mean(axis=0) - all_rows.mean(axis=0)) / all_rows.std(axis=0), 0.0, atol=0.08)
    assert_allclose(few.std(axis=0) / all_rows.std(axis=0), 1.0, atol=0.06)


def test_a_nearly_gaussian_posterior_takes_no_subsample(monkeypatch):
    monkeypatch.setattr(tall, "SMALLEST", 500)
    posterior = ddnf.fit_posterior(
        jr.key(0), ddnf.Target(prior, 3, rows=(X, Y), log_likelihood=likelihood), progress=False
    )
    assert [row.stage for row in posterior.log] == ["expand", "all rows"] and not posterior.issues
    values, weights = posterior.importance_sample(jr.key(1), 20_000, weighted=True)
    mean = np.average(values, axis=0, weights=weights)
    deviation = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
    draws = np.asarray(posterior.sample(jr.key(2), 20_000))
    assert_allclose((draws.mean(axis=0) - mean) / deviation, 0.0, atol=0.05)
    assert_allclose(draws.std(axis=0) / deviation, 1.0, atol=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rows=X), "Expected rows and log_likelihood.*got one"),
        (dict(rows=X, log_likelihood=3), "Expected log_likelihood to be a function"),
        (dict(rows=(X, Y[:5]), log_likelihood=likelihood), "one common number of rows"),
        (dict(rows=X[:0], log_likelihood=likelihood), "at least 1"),
        (dict(rows=X, log_likelihood=lambda z, x: x), "a scalar for each row; got shape \\(3,\\)"),
        (dict(rows=X, log_likelihood=lambda z, x: x @ z[:2]), "JAX can trace at a point of shape \\(3,\\) and a row"),
    ],
)
def test_bad_rows_are_one_clear_error(arguments, message, as_users_run_it):
    with pytest.raises(ValueError, match=message) as caught:
        ddnf.Target(prior, 3, **arguments)
    assert "\n" not in str(caught.value)
