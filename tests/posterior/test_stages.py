"""The stages of a fit: the policy, the log, and that the best state seen is returned."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddnf
from ddnf.posterior import regions
from ddnf.posterior.chains import run_chains
from ddnf.posterior.curvature import Derivatives
from ddnf.posterior.diagnosis import Sample
from ddnf.posterior.modes import Search
from ddnf.posterior.policy import next_stage
from ddnf.posterior.programs import Programs
from ddnf.posterior.regions import Normal, missed_mass
from tests.models.cases import EASY, HARD, funnel, gaussian, independent, judge

QUICK = dict(progress=False, steps=200, exact="never")


def small(dim):
    return ddnf.DDNF(jr.key(5), dim, blocks=2, steps=2, hidden=(4,), activation="softplus")


def student(z):
    return -3 * jnp.log1p(jnp.sum(z**2) / 3)


def test_a_gaussian_needs_no_training():
    target = ddnf.Target(EASY["correlated"].log_density, 2)
    posterior = ddnf.fit_posterior(jr.key(0), target, progress=False)
    assert posterior.stage == "base" and not posterior.issues and len(posterior.losses) == 0
    assert [row.stage for row in posterior.log] == ["modes", "base", "check"]
    assert posterior.gradients == posterior.log.gradients > 0


def test_in_many_dimensions_chains_come_before_a_flow():
    case = independent(lambda x: -jnp.cosh(x) - jnp.exp(x / 2), -9, 9, 50)
    posterior = ddnf.fit_posterior(jr.key(0), ddnf.Target(case.log_density, 50), progress=False)
    assert [row.stage for row in posterior.log] == ["modes", "base", "chains", "check"]
    assert posterior.chains is not None and posterior.chains.is_converged and not posterior.issues
    draws = np.asarray(posterior.sample(jr.key(1), 10_000), float)
    assert judge(draws, case.mean, case.deviation, ess=posterior.chains.ess, tolerance=0.02).is_right


def test_chains_that_get_nowhere_are_given_up():
    """In a funnel, where the flow comes next."""
    from ddnf.posterior.chain_stages import try_chains
    from ddnf.posterior.stages import find_modes, fit_base
    from ddnf.posterior.state import Settings, State

    target, keys = ddnf.Target(funnel(50, 3.0).log_density, 50), jr.split(jr.key(0), 4)
    settings = Settings(target, None, 10, 8, 0.1, 1, 1, "full", None, None, None, None, "auto", False, *keys)
    base = fit_base(find_modes(State(settings, Search(target), 0.1)))
    assert next_stage(base).name == "warm up"
    tried = try_chains(base)
    assert not tried.polished and 0 < tried.gradients < 500_000
    assert next_stage(tried).name == "flow 1"


def _after_one_round(case, steps=60):
    """A state whose flow has hardly been trained."""
    from ddnf.posterior.stages import find_modes, fit_base, train
    from ddnf.posterior.state import Settings, State

    target, keys = ddnf.Target(case.log_density, case.dim), jr.split(jr.key(0), 4)
    settings = Settings(target, None, steps, 32, 0.02, 1, 1, "full", None, None, None, None, "auto", False, *keys)
    return train(fit_base(find_modes(State(settings, Search(target), 0.02))), name="flow 1")


def test_plain_chains_take_the_place_of_a_flow_that_is_not_good():
    from ddnf.posterior.chain_stages import try_plain_chains

    case = HARD["rosenbrock, five pairs"]
    state = _after_one_round(case)
    assert next_stage(state).name == "plain chains"
    tried = try_plain_chains(state)
    assert tried.is_polished and tried.exact is not None and tried.exact.is_good
    assert tried.exact.candidate.stage == "base" and next_stage(tried).name == "check"
    chains = tried.exact.chains
    draws = chains.z.reshape(-1, case.dim)
    assert judge(draws, case.mean, case.deviation, ess=chains.ess, tolerance=0.05).is_right
    assert not dataclasses.replace(chains, divergences=draws.shape[0] * chains.thin // 50).has_few_divergences


def test_plain_chains_are_left_out_where_they_do_not_convince():
    """In a funnel; and nobody tries them twice, or on a target that takes long."""
    from ddnf.posterior.chain_stages import try_plain_chains

    state = _after_one_round(funnel(6, 3.0))
    tried = try_plain_chains(state)
    assert not tried.is_polished and not tried.polished and tried.gradients > state.gradients
    assert next_stage(tried).name != "plain chains"

    def slow(z):
        return jax.lax.fori_loop(0, 10_000, lambda _, x: 0.999 * x, 0.0) - jnp.sum(z**4)

    expensive = dataclasses.replace(state.settings, target=ddnf.Target(slow, 6))
    assert next_stage(state).name == "plain chains"
    assert next_stage(dataclasses.replace(state, settings=expensive)).name != "plain chains"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_base_is_returned_where_training_makes_it_worse():
    """In 100 dimensions, with a learning rate that is far too large."""
    precision = np.linspace(1.0, 3.0, 100)
    target = ddnf.Target(lambda z: -jnp.sum(precision * z**2) / 2 - jnp.sum(jnp.log(jnp.cosh(0.3 * z))), 100)
    options = dict(exact="never", flow=small(100), end="full", steps=20, rounds=1, learning_rate=3.0, progress=False)
    posterior = ddnf.fit_posterior(jr.key(0), target, **options)
    base, flow = posterior.log[1], posterior.log[2]
    assert flow.elbo < base.elbo and posterior.stage == "base"
    assert abs(posterior.elbo - base.elbo) < 0.05


def test_training_that_is_not_finite_says_once_what_the_result_is():
    def density(z):  # NaN in the tails, where only some draws are
        return jnp.where(jnp.abs(z[0]) < 2.5, student(z), jnp.nan)

    with pytest.warns(RuntimeWarning) as caught:
        posterior = ddnf.fit_posterior(
            jr.key(0), ddnf.Target(density, 2), flow=small(2), rounds=2, gradient="total", batch=64, **QUICK
        )
    texts = [str(warning.message) for warning in caught]
    assert tuple(texts) == posterior.issues
    about = [text for text in texts if "Training was not finite" in text or "were skipped" in text]
    assert len(about) == 1 and f"stage {posterior.stage}" in about[0], texts


def test_draws_without_density_are_an_issue():
    from ddnf.posterior.issues import find_issues, gather_evidence

    target = ddnf.Target(lambda z: jnp.where(jnp.abs(z[0]) < 2.0, student(z), jnp.nan), 2)
    issues = find_issues(gather_evidence(jr.key(0), small(2), target, np.zeros(0)))
    assert any("not finite at" in issue for issue in issues)


def test_a_larger_flow_has_checkpoints_of_its_own():
    from ddnf.posterior.stages import _checkpoint
    from ddnf.posterior.state import Settings, State

    target = ddnf.Target(student, 2)
    settings = Settings(
        target, None, 10, 8, 0.1, 1, 1, "full", None, None, None, "run", "auto", False, *jr.split(jr.key(0), 4)
    )
    names = {_checkpoint(State(settings, Search(target), 0.1, is_enlarged=larger)) for larger in (False, True)}
    assert len(names) == 2


def test_log_and_print(capsys):
    with pytest.warns(RuntimeWarning):
        posterior = ddnf.fit_posterior(jr.key(0), ddnf.Target(student, 2), flow=small(2), rounds=2, **QUICK)
    print(posterior.log)
    print(posterior)
    shown = capsys.readouterr().out
    assert "stage" in shown and "flow 2" in shown and "k-hat" in shown
    assert len(str(posterior).splitlines()) == 3 + len(posterior.issues)
    with pytest.warns(DeprecationWarning, match="use Posterior.issues"):
        assert posterior.complaints == posterior.issues


def test_runs_under_debug_nans():
    with jax.debug_nans(True), pytest.warns(RuntimeWarning):
        ddnf.fit_posterior(jr.key(0), ddnf.Target(student, 2), flow=small(2), rounds=1, **QUICK)


# The start.


@pytest.mark.parametrize("name", [name for name, case in HARD.items() if case.mean is None])
def test_improper_targets_are_refused(name):
    case = HARD[name]
    with pytest.raises(ValueError, match="the posterior may be improper") as error:
        ddnf.fit_posterior(jr.key(0), ddnf.Target(case.log_density, case.dim), progress=False)
    assert "\n" not in str(error.value)


@jax.custom_vjp
def _twice(x):
    return 2 * x


@jax.custom_vjp
def _square(x):
    return x**2


# As in Diffrax's adjoint, the reverse pass itself cannot be differentiated forwards.
_twice.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
_square.defvjp(lambda x: (x**2, x), lambda x, g: (_twice(x) * g,))


@pytest.mark.slow
def test_curvature_without_forward_mode():
    scales = jnp.array([1e-3, 1.0, 1e3])

    def density(z):
        u = z / scales
        return -jnp.sum(_square(u)) / 2 - u[0] * u[1] / 2

    with pytest.raises(TypeError):
        jax.hessian(density)(jnp.ones(3))
    found = Derivatives(Programs(density, 3)).hessian(np.array([1e-3, 2.0, 30.0]))
    expected = np.array([[-1, -0.5, 0], [-0.5, -1, 0], [0, 0, -1]]) / np.outer(scales, scales)
    assert found is not None
    np.testing.assert_allclose(found * np.outer(scales, scales), expected * np.outer(scales, scales), atol=1e-4)
    posterior = ddnf.fit_posterior(jr.key(0), ddnf.Target(density, 3), flow=small(3), rounds=1, **QUICK)
    assert posterior.ess > 0.98


# The second diagnosis.


def sample_of(case, z, log_q):
    return Sample(z, log_q, np.asarray(jax.vmap(case.log_density)(z)) - log_q)


@pytest.mark.parametrize("name", ["step", "half the gradient", "gradient of another mean"])
def test_chains_find_what_gradients_do_not_show(name):
    """Draws of a standard normal, for targets that are not one: by the value of the density alone."""
    case, rng = HARD[name], np.random.default_rng(0)
    shift = 0.0 if name == "step" else 0.6
    z = shift + rng.normal(size=(10_000, case.dim))
    log_q = -np.sum((z - shift) ** 2, axis=1) / 2 - case.dim / 2 * np.log(2 * np.pi)
    drift = run_chains(jr.key(0), ddnf.Target(case.log_density, case.dim), sample_of(case, z, log_q), z[:0])
    assert drift.mean > 0.3


@pytest.mark.parametrize("seed", range(10))
def test_chains_stay_where_the_fit_is_right(seed):
    case, z = gaussian(np.zeros(5), np.eye(5)), np.random.default_rng(seed).normal(size=(10_000, 5))
    drift = run_chains(jr.key(seed), ddnf.Target(case.log_density, 5), sample_of(case, z, 0 * z[:, 0]), z[:0])
    assert drift.mean == drift.deviation == drift.energy == 0 and drift.error < 0.05


def test_draws_that_are_alike_say_less():
    case, z = gaussian(np.zeros(2), np.eye(2)), np.random.default_rng(0).normal(size=(10_000, 2))
    target, sample = ddnf.Target(case.log_density, 2), sample_of(case, z, 0 * z[:, 0])
    few, many = (run_chains(jr.key(0), target, sample._replace(effective=n), z[:0]).error for n in (200.0, None))
    assert few > 1.3 * many


def test_mass_beside_the_fit_is_found():
    """The broad component, from a fit of the narrow one, and the narrow from the broad."""
    case = HARD["narrow in broad"]
    target = ddnf.Target(case.log_density, 5)
    normals = Normal(np.full(5, 1.2), 0.2 * np.eye(5)), Normal(np.zeros(5), 2.0 * np.eye(5))
    rng = np.random.default_rng(0)
    for fit, other in (normals, normals[::-1]):
        x = rng.normal(size=(10_000, 5))
        log_q = -np.sum(x**2, axis=1) / 2 - 2.5 * np.log(2 * np.pi) - np.log(np.diag(fit.scale)).sum()
        sample = sample_of(case, fit.mean + x @ fit.scale.T, log_q)
        (found,) = missed_mass(jr.key(0), target, sample, [other])
        assert 0.4 < found.share < 0.6 and found.least > 0.3
        own = missed_mass(jr.key(0), target, sample, [fit])
        assert all(one.least < 0.02 for one in own)


def test_a_mode_that_one_heavy_draw_has_hit_joins():
    """A needle with 40 % of the mass: most draws of the broad component do not show it."""
    case = HARD["needle"]
    posterior = ddnf.fit_posterior(jr.key(0), ddnf.Target(case.log_density, 2), progress=False)
    assert any(row.stage.startswith("join") for row in posterior.log) and not posterior.issues
    draws = np.asarray(posterior.sample(jr.key(1), 10_000))
    assert_allclose(np.mean(np.linalg.norm(draws - 1, axis=1) < 0.1), 0.4, atol=0.02)


def test_a_target_without_density_outside_of_its_modes_is_checked_all_the_same():
    from ddnf.posterior.issues import _outliers

    target = ddnf.Target(lambda z: jnp.where(jnp.sum(z**2) < 1, -jnp.sum(z**2), jnp.nan), 2)
    assert len(_outliers(jr.key(0), target, np.zeros(2), np.ones(2), [Normal(np.zeros(2), np.eye(2))])) == 6


def test_weights_of_rare_hits_do_not_hide_what_they_hit():
    log_weights = np.zeros(2000)
    log_weights[0] = 20.0
    weights, log_known = regions._truncated(log_weights)
    assert_allclose(np.mean(weights), 1)
    assert abs(log_known) < 0.1 and weights.max() < 2 * np.sqrt(2000)


def test_policy_begins_with_the_modes():
    from ddnf.posterior.state import Settings, State

    target = ddnf.Target(student, 2)
    keys = jr.split(jr.key(0), 4)
    settings = Settings(target, None, 10, 8, 0.1, 1, 1, "full", None, None, None, None, "auto", False, *keys)
    assert next_stage(State(settings, Search(target), 0.1)).name == "modes"
