"""Harder posteriors of posteriordb as NumPyro models, with the moments of their reference draws.

posterior = HARDER[name]
draws = ...  # of posterior.model(**posterior.data(folder))
moments(folder, name)  # names, means and deviations
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from tests.models.posteriordb import POSTERIORS, Posterior, scalars


def eight_schools_centered(y, sigma):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(y)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def poisson_process(x, k):
    rho = numpyro.sample("rho", dist.Gamma(25, 4))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([len(x)]).to_event(1))
    kernel = alpha**2 * jnp.exp(-0.5 * ((x[:, None] - x) / rho) ** 2)
    # In single precision 1e-10 on the diagonal is nothing.
    jitter = 1e-10 if kernel.dtype == jnp.float64 else 1e-5
    f = numpyro.deterministic("f", jnp.linalg.cholesky(kernel + jitter * jnp.eye(len(x))) @ z)
    numpyro.sample("k", dist.Poisson(jnp.exp(f)), obs=k.astype(int))


def arma11(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    phi = numpyro.sample("phi", dist.Normal(0, 2))
    theta = numpyro.sample("theta", dist.Normal(0, 2))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    first = y[0] - (mu + phi * mu)

    def month(err, pair):
        before, now = pair
        err = now - (mu + phi * before + theta * err)
        return err, err

    _, errs = jax.lax.scan(month, first, (y[:-1], y[1:]))
    numpyro.sample("err", dist.Normal(0, sigma), obs=jnp.concatenate([first[None], errs]))


def _hidden_markov(log_emission, theta1, theta2):
    """Log-likelihood of two hidden states without a prior on the first."""
    log_theta = jnp.log(jnp.stack([theta1, theta2]))

    def step(gamma, emission):
        return jax.nn.logsumexp(gamma[:, None] + log_theta, axis=0) + emission, None

    gamma, _ = jax.lax.scan(step, log_emission[0], log_emission[1:])
    return jax.nn.logsumexp(gamma)


def _positive_ordered(name):
    """0 < a1 < a2, with a flat density."""
    return numpyro.sample(name, dist.ImproperUniform(constraints.positive_ordered_vector, (), (2,)))


def hmm_example(y):
    theta1, theta2 = (numpyro.sample(f"theta{i}", dist.Dirichlet(jnp.ones(2))) for i in (1, 2))
    mu = _positive_ordered("mu")
    numpyro.factor("prior", dist.Normal(jnp.array([3.0, 10.0]), 1.0).log_prob(mu).sum())
    numpyro.factor("y", _hidden_markov(dist.Normal(mu, 1.0).log_prob(y[:, None]), theta1, theta2))


def hmm_drive(u, v, alpha):
    theta1, theta2 = (numpyro.sample(f"theta{i + 1}", dist.Dirichlet(jnp.asarray(alpha[i]))) for i in (0, 1))
    phi, lam = _positive_ordered("phi"), _positive_ordered("lambda")
    for rates in (phi, lam):
        numpyro.factor(
            f"prior {'phi' if rates is phi else 'lambda'}",
            dist.Normal(jnp.array([0.0, 3.0]), 1.0).log_prob(rates).sum(),
        )
    emission = dist.Exponential(phi).log_prob(u[:, None]) + dist.Exponential(lam).log_prob(v[:, None])
    numpyro.factor("uv", _hidden_markov(emission, theta1, theta2))


def diamonds(X, Y):
    centred = X[:, 1:] - X[:, 1:].mean(axis=0)
    b = numpyro.sample("b", dist.Normal(0, 1).expand([centred.shape[1]]).to_event(1))
    intercept = numpyro.sample("Intercept", dist.StudentT(3, 8, 10))
    sigma = numpyro.sample("sigma", dist.FoldedDistribution(dist.StudentT(3, 0, 10)))
    numpyro.sample("Y", dist.Normal(intercept + centred @ b, sigma), obs=Y)


def lotka_volterra(ts, y_init, y):
    rates = jnp.array([1.0, 0.05, 1.0, 0.05])
    theta = numpyro.sample(
        "theta", dist.TruncatedNormal(rates, rates * jnp.array([0.5, 1.0, 0.5, 1.0]), low=0.0).to_event(1)
    )
    sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1).expand([2]).to_event(1))
    z_init = numpyro.sample("z_init", dist.LogNormal(jnp.log(10.0), 1).expand([2]).to_event(1))

    def velocity(t, state, theta):
        u, v = state
        return jnp.stack([(theta[0] - theta[1] * v) * u, (-theta[2] + theta[3] * u) * v])

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(velocity), diffrax.Tsit5(), 0.0, ts[-1], 0.1, z_init, theta,
        saveat=diffrax.SaveAt(ts=ts), stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-5), throw=False,
    )  # fmt: skip
    populations = jnp.maximum(solution.ys, 1e-6)
    numpyro.sample("y_init", dist.LogNormal(jnp.log(z_init), sigma).to_event(1), obs=y_init)
    numpyro.sample("y", dist.LogNormal(jnp.log(populations), sigma).to_event(2), obs=y)


def one_compartment(times, C_hat, D, V, t0):
    k_a, K_m, V_m, sigma = (numpyro.sample(name, dist.HalfCauchy(1)) for name in ("k_a", "K_m", "V_m", "sigma"))

    def velocity(t, c, parameters):
        k_a, K_m, V_m = parameters
        return jnp.exp(-k_a * t) * D * k_a / V - (V_m / V) * c / (K_m + c)

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(velocity), diffrax.Tsit5(), t0, times[-1], 0.01, jnp.zeros(()), (k_a, K_m, V_m),
        saveat=diffrax.SaveAt(ts=times), stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-6), throw=False,
    )  # fmt: skip
    numpyro.sample("C_hat", dist.LogNormal(jnp.log(jnp.maximum(solution.ys, 1e-10)), sigma), obs=C_hat)


def accel_gp(Y, Xgp_1, slambda_1, Xgp_sigma_1, slambda_sigma_1):
    def process(name, X, frequencies, intercept):
        location = numpyro.sample(f"Intercept{name}", intercept)
        deviation = numpyro.sample(f"sdgp{name}_1", dist.FoldedDistribution(dist.StudentT(3, 0, 36)))
        length = numpyro.sample(f"lscale{name}_1", dist.InverseGamma(1.124909, 0.0177))
        z = numpyro.sample(f"zgp{name}_1", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        l2 = (length * frequencies[:, 0]) ** 2
        root = deviation * (2 * jnp.pi) ** 0.25 * jnp.sqrt(length) * jnp.exp(-l2 / 4)
        return location + X @ (root * z)

    mean = process("", Xgp_1, slambda_1, dist.StudentT(3, -13, 36))
    log_sigma = process("_sigma", Xgp_sigma_1, slambda_sigma_1, dist.StudentT(3, 0, 10))
    numpyro.sample("Y", dist.Normal(mean, jnp.exp(log_sigma)), obs=Y)


def radon(log_radon, floor_measure, county_idx, centered=True):
    mu = numpyro.sample("mu_alpha", dist.Normal(0, 10))
    beta = numpyro.sample("beta", dist.Normal(0, 10))
    sigma_alpha = numpyro.sample("sigma_alpha", dist.HalfNormal(1))
    sigma_y = numpyro.sample("sigma_y", dist.HalfNormal(1))
    with numpyro.plate("counties", 85):
        if centered:
            alpha: Any = numpyro.sample("alpha", dist.Normal(mu, sigma_alpha))
        else:
            alpha = numpyro.deterministic("alpha", mu + sigma_alpha * numpyro.sample("z", dist.Normal(0, 1)))
    county = county_idx.astype(int) - 1
    numpyro.sample("log_radon", dist.Normal(alpha[county] + beta * floor_measure, sigma_y), obs=log_radon)


def _read(file: str, columns: str, folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "posteriordb" / f"{file}.data.json").read_text())
    return {column: np.asarray(content[column], float) for column in columns.split()}


def _posterior(model, file: str, columns: str, sites: str) -> Posterior:
    return Posterior(model, partial(_read, file, columns), {site: site for site in sites.split()})


_GP = "Intercept sdgp_1 lscale_1 zgp_1 Intercept_sigma sdgp_sigma_1 lscale_sigma_1 zgp_sigma_1"
_RADON = "log_radon floor_measure county_idx", "alpha mu_alpha beta sigma_alpha sigma_y"

HARDER: dict[str, Posterior] = {
    "eight_schools centred": _posterior(eight_schools_centered, "eight_schools", "y sigma", "theta mu tau"),
    "gp_pois_regr-gp_pois_regr": _posterior(poisson_process, "gp_pois_regr", "x k", "rho alpha f"),
    "arma-arma11": _posterior(arma11, "arma", "y", "mu phi theta sigma"),
    "hmm_example-hmm_example": _posterior(hmm_example, "hmm_example", "y", "theta1 theta2 mu"),
    "bball_drive_event_0-hmm_drive_0": _posterior(
        hmm_drive, "bball_drive_event_0", "u v alpha", "theta1 theta2 phi lambda"
    ),
    "diamonds-diamonds": _posterior(diamonds, "diamonds", "X Y", "b Intercept sigma"),
    "hudson_lynx_hare-lotka_volterra": _posterior(
        lotka_volterra, "hudson_lynx_hare", "ts y_init y", "theta z_init sigma"
    ),
    "one_comp_mm_elim_abs-one_comp_mm_elim_abs": _posterior(
        one_compartment, "one_comp_mm_elim_abs", "times C_hat D V t0", "k_a K_m V_m sigma"
    ),
    "mcycle_gp-accel_gp": _posterior(accel_gp, "mcycle_gp", "Y Xgp_1 slambda_1 Xgp_sigma_1 slambda_sigma_1", _GP),
    "radon centred": _posterior(radon, "radon_mn", *_RADON),
    "radon non-centred": _posterior(partial(radon, centered=False), "radon_mn", *_RADON),
}
_FILES = {
    "eight_schools centred": "eight_schools-eight_schools_noncentered",
    "radon centred": "radon_mn",
    "radon non-centred": "radon_mn",
}
ALL = POSTERIORS | HARDER


def moments(folder: Path, name: str) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names of the scalars, their means and their deviations."""
    with np.load(folder / "posteriordb" / f"{_FILES.get(name, name)}.npz", allow_pickle=False) as file:
        names = [str(scalar) for scalar in file["names"]]
        if "mean" in file.files:
            return names, file["mean"], file["sd"]
        draws = file["draws"].reshape(-1, len(names))
        return names, draws.mean(axis=0), draws.std(axis=0)


def worst_errors(posterior: Posterior, draws, folder: Path, name: str) -> tuple[float, float]:
    """The largest error of a mean in reference deviations, and of a deviation as a share."""
    names, mean, deviation = moments(folder, name)
    known = scalars({site: draws[site] for site in posterior.names})
    found = posterior.scalars(draws) if set(known) != set(names) else known
    table = np.stack([found[name] for name in names])
    shift = np.abs(table.mean(axis=1) - mean) / deviation
    return float(shift.max()), float(np.abs(table.std(axis=1) / deviation - 1).max())
