"""Posteriors: right moments without tuning, honest figures, warnings where a fit can't be trusted."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import Affine, Chain, Invert, Sigmoid, TriangularAffine
from flowjax.distributions import StandardNormal, Transformed
from numpy.testing import assert_allclose

import ddnf
from ddnf.flow.batch import carries_score, transform_with_score
from ddnf.flow.folds import folded_share, reverse
from ddnf.posterior import issues, stages
from ddnf.posterior.evaluate import draw
from ddnf.posterior.modes import Search, gaussians, merged
from ddnf.posterior.objective import ReverseKL, whitening
from ddnf.training import loop as train
from tests.bijections import BIJECTIONS

QUICK = dict(steps=500, rounds=4, exact="never", progress=False)


def small(dim, **options):
    return ddnf.DDNF(jr.key(5), dim, blocks=2, steps=2, hidden=(4,), **options)


def banana(z):
    return -(z[0] ** 2) / 2 - (z[1] - z[0] ** 2 / 2) ** 2 - 3.0


BANANA_LOG_Z = -3.0 + np.log(np.sqrt(2 * np.pi) * np.sqrt(np.pi))


@pytest.fixture(scope="module")
def fitted():
    return ddnf.fit_posterior(jr.key(0), ddnf.Target(banana, 2), flow=small(2, activation="softplus"), **QUICK)


# Scores.


@pytest.mark.parametrize("name", [name for name in BIJECTIONS if "condition" not in name])
def test_scores_are_carried_exactly(name):
    flow = BIJECTIONS[name]()
    if not isinstance(flow, ddnf.DDNF) or flow.inversion != "exact":
        pytest.skip("not a flow with an exact inverse")
    flow = flow.with_log_det(ddnf.Exact())
    x = 0.5 * jr.normal(jr.key(1), flow.shape)

    @jax.jit
    def run(x):
        gradient = jax.grad(lambda x: -jnp.sum(x**2) / 2 - flow.transform_and_log_det(x)[1])(x)
        known = flow.transform_and_log_det(x)
        return flow.transform_with_score(x, -x), known, gradient, jax.jacobian(flow.transform)(x)

    (y, log_det, score), known, gradient, jacobian = run(x)
    assert_allclose(score, np.linalg.solve(np.asarray(jacobian).T, gradient), atol=1e-9)
    assert_allclose(y, known[0], atol=1e-12)
    assert_allclose(log_det, known[1], atol=1e-12)


def test_scores_go_through_chains():
    chain = Chain([small(2, output_scale=1.0), TriangularAffine(jnp.ones(2), jnp.array([[2.0, 0.0], [1.0, 0.5]]))])
    x = jnp.array([0.3, -0.8])
    for whole in (chain, Invert(chain), Chain([Invert(chain), Sigmoid((2,))])):
        assert carries_score(whole)
        q = Transformed(StandardNormal((2,)), whole)

        @jax.jit
        def run(x, whole=whole, q=q):
            (y,), (log_det,), (score,) = transform_with_score(whole, x[None], -x[None])
            return log_det, score, whole.transform_and_log_det(x)[1], jax.grad(q.log_prob)(y)

        log_det, score, known, expected = run(x)
        assert_allclose(score, expected, atol=1e-8)
        assert_allclose(log_det, known)
    assert not carries_score(Invert(small(50))) and carries_score(small(50))


def test_scores_of_a_batch():
    flow = small(3, output_scale=1.0)
    x = jr.normal(jr.key(0), (7, 3))
    one_by_one = jax.vmap(flow.transform_with_score)(x, -x)
    for a, b in zip(flow.batch_transform_with_score(x, -x), one_by_one, strict=True):
        assert_allclose(a, b, atol=1e-12)


# Gradients of the loss.


def _gradients(gradient, count, flow=None):
    whiten = whitening(np.array([0.1, 0.2]), np.array([[1.0, 0.0], [0.3, 0.7]]), "full")
    flow = Chain([small(2, output_scale=0.5), whiten.end()]) if flow is None else flow
    loss = ReverseKL(banana, whiten, None, 16, gradient, 0, jnp.asarray(1.0))
    one = eqx.filter_jit(eqx.filter_grad(lambda f, key: loss(f, train.Draw(key, jnp.array(0), None))))
    keys = jr.split(jr.key(1), count)
    return np.stack([np.concatenate([np.ravel(a) for a in jax.tree.leaves(one(flow, key))]) for key in keys])


def test_path_and_total_gradients_have_the_same_expectation():
    path, total = _gradients("path", 400), _gradients("total", 400)
    error = np.sqrt((path.var(axis=0) + total.var(axis=0)) / 400) + 1e-12
    z = (path.mean(axis=0) - total.mean(axis=0)) / error
    assert np.abs(z).max() < 4.5 and np.abs(z).mean() < 1.2


def test_path_gradient_has_no_variance_at_the_solution():
    """The flow that carries the normal to the target itself: each single gradient is zero."""
    flow = small(2, output_scale=0.5)
    whiten = whitening(np.zeros(2), np.eye(2), "full")
    chain = Chain([flow, whiten.end()])
    q = Transformed(StandardNormal((2,)), chain)
    draw = train.Draw(jr.key(0), jnp.array(0), None)
    for gradient, bound in (("path", 1e-6), ("total", None)):
        loss = ReverseKL(q.log_prob, whiten, None, 8, gradient, 0, jnp.asarray(1.0))
        value, slope = eqx.filter_jit(eqx.filter_value_and_grad(loss))(chain, draw)
        assert_allclose(value, 0.0, atol=1e-7)
        size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(slope))
        assert size < bound if bound else size > 1e-2


# The start.


def test_start_of_a_gaussian_is_the_gaussian():
    mean, scale = np.array([30.0, -2.0, 1e3]), np.array([[2.0, 0, 0], [0.5, 1e-2, 0], [5.0, 0.1, 50.0]])
    precision = np.linalg.inv(scale @ scale.T)
    target = ddnf.Target(lambda z: -(z - mean) @ precision @ (z - mean) / 2, 3)
    (found,) = gaussians(jr.key(0), target, Search(target), 3)
    assert_allclose(found.mean, mean, rtol=1e-4)
    assert_allclose(found.scale, scale, rtol=1e-5, atol=1e-6)


def test_two_modes_are_found_and_merged():
    def two(z):
        return jnp.logaddexp(-jnp.sum((z - 8) ** 2) / 2, -jnp.sum((z + 8) ** 2) / 2)

    target = ddnf.Target(two, 2)
    modes = gaussians(jr.key(0), target, Search(target), 8)
    assert len(modes) == 2
    both = merged(modes)
    assert_allclose(both.mean, 0.0, atol=0.5)
    assert_allclose(both.scale @ both.scale.T, [[65, 64], [64, 65]], rtol=0.02)


# The fit.


def test_moments_and_evidence(fitted):
    assert not fitted.issues
    assert fitted.khat < 0.7 and fitted.ess > 0.9
    assert_allclose(fitted.log_evidence, BANANA_LOG_Z, atol=0.02)
    assert fitted.elbo < BANANA_LOG_Z + 3 * fitted.elbo_error
    z, weights = fitted.importance_sample(jr.key(2), 20_000, weighted=True)
    assert_allclose(weights.sum(), 1.0)
    assert_allclose(weights @ z, [0.0, 0.5], atol=0.04)
    resampled = fitted.importance_sample(jr.key(3), 5000)
    assert_allclose(resampled.mean(axis=0), [0.0, 0.5], atol=0.06)


def test_log_prob_is_that_of_the_draws(fitted):
    z, log_q = draw(fitted.flow, jr.key(0), 50)
    assert_allclose(fitted.log_prob(z), log_q, atol=1e-7)
    assert fitted.log_prob(z[0]).shape == () and fitted.log_prob(z.reshape(5, 10, 2)).shape == (5, 10)


def test_summary(fitted):
    table = fitted.summary()
    assert set(table.rows) == {"z[0]", "z[1]"}
    assert "khat" in str(table) and "z[1]" in str(table) and "<table>" in table._repr_html_()
    assert abs(table.rows["z[1]"]["mean"] - 0.5) < 0.2


def test_save_and_load(fitted, tmp_path):
    fitted.save(tmp_path / "posterior.ddnf")
    alone = ddnf.load(tmp_path / "posterior.ddnf")
    assert isinstance(alone, ddnf.Posterior)
    assert (alone.elbo, alone.khat, alone.ess) == (fitted.elbo, fitted.khat, fitted.ess)
    assert (alone.sample(jr.key(0), 20) == fitted.sample(jr.key(0), 20)).all()
    with pytest.raises(ValueError, match="target="):
        alone.importance_sample(jr.key(0), 10)
    again = ddnf.load(tmp_path / "posterior.ddnf", target=fitted.target)
    assert isinstance(again, ddnf.Posterior)
    again.importance_sample(jr.key(0), 100)
    with pytest.raises(ValueError, match="2 dimensions; got 3"):
        ddnf.load(tmp_path / "posterior.ddnf", target=ddnf.Target(lambda z: -jnp.sum(z**2), 3))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_own_flow_needs_like(tmp_path):
    flow = ddnf.DDNF(jr.key(0), 2, blocks=1, steps=2, field=lambda key: lambda z, condition: -0.1 * z)
    posterior = ddnf.fit_posterior(jr.key(0), ddnf.Target(banana, 2), flow=flow, **(QUICK | dict(steps=20)))
    posterior.save(tmp_path / "own.ddnf")
    with pytest.raises(ValueError, match="like="):
        ddnf.load(tmp_path / "own.ddnf")
    loaded = ddnf.load(tmp_path / "own.ddnf", like=posterior.flow)
    assert_allclose(loaded.log_prob(jnp.ones(2)), posterior.log_prob(jnp.ones(2)))


@pytest.mark.parametrize("end", ["full", "diagonal", None])
def test_ends(end):
    target = ddnf.Target(lambda z: -jnp.sum(z**2) / 2 - 0.3 * z[0] * z[1], 2)
    posterior = ddnf.fit_posterior(jr.key(0), target, flow=small(2), end=end, batch=64, **QUICK)
    assert_allclose(posterior.log_evidence, np.log(2 * np.pi) - np.log(1 - 0.09) / 2, atol=0.02)
    kinds = {"full": TriangularAffine, "diagonal": Affine, None: ddnf.DDNF}
    last = posterior.flow
    if end:
        assert isinstance(last, Chain)
        last = last.bijections[-1]
    assert isinstance(last, kinds[end])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_training_with_another_rule_is_judged_by_the_exact_one():
    flow = small(2, log_det=ddnf.Taylor(2, probes=1), inverse="reverse")
    posterior = ddnf.fit_posterior(
        jr.key(0), ddnf.Target(banana, 2), flow=flow, learning_rate=1e-3, **(QUICK | dict(steps=100, rounds=1))
    )
    assert isinstance(posterior.flow, Chain)
    trained = posterior.flow.bijections[0]
    assert isinstance(trained, ddnf.DDNF)
    assert isinstance(trained.log_det, ddnf.Exact) and trained.inversion == "exact"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_regularizer_keeps_the_flow_short():
    def length(gamma):
        def regularizer(flow, x):
            return gamma * ddnf.geodesic(flow.path(x)[1])

        posterior = ddnf.fit_posterior(
            jr.key(0),
            ddnf.Target(banana, 2),
            flow=small(2),
            regularizer=regularizer,
            **QUICK,
        )
        assert isinstance(posterior.flow, Chain)
        trained = posterior.flow.bijections[0]
        assert isinstance(trained, ddnf.DDNF)
        _, path = jax.vmap(trained.path)(jr.normal(jr.key(1), (100, 2)))
        return float(jnp.mean(jax.vmap(ddnf.geodesic)(path)))

    assert length(10.0) < 0.5 * length(0.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_checkpoint_of_a_posterior(tmp_path):
    options = dict(flow=small(2), **(QUICK | dict(steps=100)), checkpoint=tmp_path / "run")
    first = ddnf.fit_posterior(jr.key(0), ddnf.Target(banana, 2), **options)
    second = ddnf.fit_posterior(jr.key(0), ddnf.Target(banana, 2), **options)
    assert (first.sample(jr.key(0), 5) == second.sample(jr.key(0), 5)).all()


# Fits that can't be trusted.


def far_modes(z):
    return jnp.logaddexp(-jnp.sum((z - 10) ** 2) / 2, -jnp.sum((z + 10) ** 2) / 2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_missed_mode_is_reported():
    target = ddnf.Target(far_modes, 2, initial=lambda key: jnp.array([9.0, 9.0]))
    with pytest.warns(RuntimeWarning, match="misses about [45].% of the target"):
        posterior = ddnf.fit_posterior(jr.key(0), target, flow=small(2), searches=1, **QUICK)
    assert posterior.issues


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_narrow_fit_is_reported():
    def student(z):
        return -jnp.sum(jnp.log1p(z**2))  # Cauchy: no Gaussian tail follows it

    with pytest.warns(RuntimeWarning, match="(k-hat is|Importance weights).*Train longer"):
        ddnf.fit_posterior(
            jr.key(0), ddnf.Target(student, 2), flow=small(2), learning_rate=1e-6, **(QUICK | dict(steps=10, rounds=1))
        )


def test_folds_are_reported():
    flow = ddnf.DDNF(jr.key(0), 2, blocks=1, steps=1, hidden=(4,), output_scale=20.0)
    x = jr.normal(jr.key(0), (100, 2))
    end = Affine(jnp.ones(2))
    for whole in (flow, Chain([small(2), flow]), reverse(Chain([Chain([Invert(end)]), Invert(flow)])), Invert(flow)):
        assert folded_share(whole, x) > 0
    assert folded_share(Chain([small(2), end]), x) == 0
    assert folded_share(Invert(small(2)), x) == 0


def test_a_fit_that_folds_says_so():
    flow = ddnf.DDNF(jr.key(0), 2, blocks=1, steps=1, hidden=(4,), output_scale=20.0)
    with pytest.warns(RuntimeWarning) as caught:
        ddnf.fit_posterior(
            jr.key(0), ddnf.Target(banana, 2), flow=flow, steps=2, rounds=1, learning_rate=1e-9, progress=False
        )
    assert any("of the flow's cells folds" in str(warning.message) for warning in caught)


def test_losses_that_still_fall_are_reported():
    settled, falling = np.full(30, 5.0), 30.0 - np.arange(30.0)
    assert issues._still_falling(settled) is None
    assert issues._still_falling(falling) is not None


# Bad input.


def good(**options):
    return ddnf.fit_posterior(jr.key(0), **(dict(target=ddnf.Target(banana, 2)) | QUICK | options))


BAD = {
    "no function": (lambda: ddnf.Target(3.0, 2), "to be a function"),
    "dim 0": (lambda: ddnf.Target(banana, 0), "dim to be an integer of at least 1"),
    "dim no integer": (lambda: ddnf.Target(banana, 2.5), "dim to be an integer"),
    "a vector": (lambda: ddnf.Target(lambda z: z, 2), "return a scalar"),
    "an integer": (lambda: ddnf.Target(lambda z: jnp.array(3), 2), "floating-point number"),
    "nothing": (lambda: ddnf.Target(lambda z: None, 2), "return a scalar"),
    "NumPy inside": (lambda: ddnf.Target(lambda z: np.sum(np.asarray(z)), 2), "JAX can trace"),
    "another dim": (lambda: ddnf.Target(lambda z: -(z @ jnp.ones(3)), 2), r"shape \(2,\)"),
    "NaN everywhere": (lambda: good(target=ddnf.Target(lambda z: jnp.sum(z) * jnp.nan, 2)), "finite somewhere"),
    "-inf everywhere": (lambda: good(target=ddnf.Target(lambda z: jnp.sum(z) - jnp.inf, 2)), "finite somewhere"),
    "no target": (lambda: good(target=banana), "Expected a ddnf.Target"),
    "steps 0": (lambda: good(steps=0), "steps to be an integer of at least 1"),
    "batch 0": (lambda: good(batch=0), "batch to be an integer of at least 1"),
    "rounds 0": (lambda: good(rounds=0), "rounds to be an integer of at least 1"),
    "searches 0": (lambda: good(searches=0), "searches to be an integer of at least 1"),
    "learning rate 0": (lambda: good(learning_rate=0.0), "positive learning_rate"),
    "learning rate NaN": (lambda: good(learning_rate=float("nan")), "positive learning_rate"),
    "end": (lambda: good(end="round"), "end to be auto"),
    "gradient": (lambda: good(gradient="steep"), "gradient to be path"),
    "temper": (lambda: good(temper=2.0), "temper between 0 and 1"),
    "flow of another dim": (lambda: good(flow=small(3)), r"flow of shape \(2,\)"),
    "flow with condition": (lambda: good(flow=small(2, condition_dim=1)), "without condition"),
    "no flow": (lambda: good(flow="wide"), "FlowJAX bijection"),
}


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_bad_use(fitted, tmp_path):
    with pytest.raises(ValueError, match="n to be an integer of at least 1"):
        fitted.sample(jr.key(0), 0)
    with pytest.raises(ValueError, match="points of shape"):
        fitted.log_prob(jnp.ones(3))
    with pytest.raises(OSError, match="Could not write"):
        fitted.save(tmp_path / "nowhere" / "x.ddnf")


def test_starts_without_density_are_passed_over():
    target = ddnf.Target(lambda z: jnp.where(z[0] > -1, 0.0, -jnp.inf) - jnp.sum((z - 9) ** 2), 2)
    (found,) = gaussians(jr.key(0), target, Search(target), 4)
    assert_allclose(found.mean, 9.0, atol=1e-3)


def test_a_wall_next_to_the_mode_is_an_error():
    target = ddnf.Target(lambda z: jnp.where(z[0] > 0, -z[0] - z[1] ** 2, -jnp.inf), 2)
    with pytest.raises(ValueError, match="transformed to unbounded"):
        gaussians(jr.key(0), target, Search(target), 4)


def test_no_warnings_for_a_good_fit():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        good(flow=small(2, activation="softplus"))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_round_that_folds_restarts_with_a_smaller_rate(monkeypatch):
    rates, adam, shares = [], train.adam, iter([0.0, 0.0, 0.1, 0.0, 0.0])
    monkeypatch.setattr(train, "adam", lambda rate, steps, **rest: rates.append(rate) or adam(rate, steps, **rest))
    monkeypatch.setattr(stages, "folded_share", lambda *_: next(shares))
    target = ddnf.Target(lambda z: -jnp.sum(jnp.log1p(z**2)), 2)
    posterior = ddnf.fit_posterior(jr.key(0), target, flow=small(2), steps=30, rounds=3, exact="never", progress=False)
    assert rates == [0.02, 0.02, 0.005]
    assert "folds, restart at rate 0.005" in str(posterior.log)
