"""Eight more posteriors on simulated data, each with a geometry of its own, none with more than 25 dimensions."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import OrderedTransform


class Other(NamedTuple):
    """A model and its arguments: `model(*args)`; `dim` counts its unconstrained dimensions."""

    model: Callable[..., None]
    args: tuple[np.ndarray, ...]
    dim: int


def mixture(y):
    """Two Gaussians, the smaller mean first."""
    weight = numpyro.sample("weight", dist.Beta(2, 2))
    means = dist.TransformedDistribution(dist.Normal(0, 2).expand([2]).to_event(1), OrderedTransform())
    mu = numpyro.sample("mu", means)
    sigma = numpyro.sample("sigma", dist.HalfNormal(2).expand([2]).to_event(1))
    components = dist.Categorical(probs=jnp.stack([weight, 1 - weight]))
    numpyro.sample("y", dist.MixtureSameFamily(components, dist.Normal(mu, sigma)), obs=y)


def simulate_mixture(rng):
    first = rng.uniform(size=150) < 0.35
    return (np.where(first, rng.normal(-2.0, 0.7, 150), rng.normal(2.0, 1.2, 150)),)


def stochastic_volatility(returns):
    """Daily returns (weeks, days); the log-volatility of a week follows an AR(1)."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    phi = numpyro.sample("phi", dist.Beta(5, 2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([len(returns)]).to_event(1))

    def week(h, z):
        h = phi * h + sigma * z
        return h, h

    _, h = jax.lax.scan(week, 0.0, z)
    numpyro.sample("returns", dist.Normal(0, jnp.exp((mu + h) / 2)[:, None]), obs=returns)


def simulate_volatility(rng, weeks=20, days=5):
    h = [rng.normal(0, 0.5)]
    for _ in range(weeks - 1):
        h.append(0.8 * h[-1] + 0.5 * rng.normal())
    return (np.exp(np.array(h) / 2)[:, None] * rng.normal(size=(weeks, days)),)


def logistic(X, y):
    """Columns with correlations near 0.8."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    beta = numpyro.sample("beta", dist.Normal(0, 2.5).expand([X.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ beta), obs=y)


def simulate_logistic(rng, n=250, dim=10):
    X = np.sqrt(0.8) * rng.normal(size=(n, 1)) + np.sqrt(0.2) * rng.normal(size=(n, dim))
    logits = -0.5 + X @ rng.normal(0, 0.7, dim)
    return X, (rng.uniform(size=n) < 1 / (1 + np.exp(-logits))).astype(int)


def poisson_effects(group, x, y):
    """Counts in nine groups, noncentered."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", 9):
        z = numpyro.sample("z", dist.Normal(0, 1))
        effect = numpyro.deterministic("effect", tau * z)
    numpyro.sample("y", dist.Poisson(jnp.exp(intercept + slope * x + jnp.take(effect, group))), obs=y)


def simulate_counts(rng, n=90):
    group, x = np.arange(n) % 9, rng.normal(size=n)
    return group, x, rng.poisson(np.exp(0.7 + 0.4 * x + 0.5 * rng.normal(size=9)[group]))


def dirichlet_multinomial(counts):
    """Overdispersed counts (places, kinds): a simplex and its concentration."""
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(counts.shape[1])))
    concentration = numpyro.sample("concentration", dist.LogNormal(2, 1))
    numpyro.sample("counts", dist.DirichletMultinomial(concentration * share, counts.sum(1)), obs=counts)


def simulate_shares(rng, places=15):
    share = np.array([0.35, 0.25, 0.18, 0.12, 0.07, 0.03])
    return (np.stack([rng.multinomial(30, p) for p in rng.dirichlet(12 * share, places)]),)


def correlation(y):
    """Mean, scales and correlation matrix of a Gaussian."""
    dim = y.shape[1]
    mu = numpyro.sample("mu", dist.Normal(0, 5).expand([dim]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfCauchy(2.5).expand([dim]).to_event(1))
    L = numpyro.sample("L", dist.LKJCholesky(dim, 2.0))
    numpyro.sample("y", dist.MultivariateNormal(mu, scale_tril=jnp.diag(scale) @ L), obs=y)


def simulate_gaussian(rng, n=40):
    L = np.linalg.cholesky([[1, 0.8, -0.3], [0.8, 1, 0.1], [-0.3, 0.1, 1]])
    return (np.array([1.0, -2.0, 0.0]) + rng.normal(size=(n, 3)) @ L.T * np.array([0.5, 2.0, 10.0]),)


def robust_regression(X, y):
    """Student-t errors, their degrees of freedom unknown."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 10))
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    nu = numpyro.sample("nu", dist.Gamma(2, 0.1))
    numpyro.sample("y", dist.StudentT(nu, intercept + X @ beta, sigma), obs=y)


def simulate_outliers(rng, n=100):
    X = rng.normal(size=(n, 3)) * np.array([1.0, 5.0, 0.2])
    return X, 3 + X @ np.array([1.5, -0.5, 2.0]) + rng.standard_t(3, n)


def garch(y):
    """GARCH(1,1), kept stationary by a support that depends on another site."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    alpha0 = numpyro.sample("alpha0", dist.HalfNormal(2))
    alpha1 = numpyro.sample("alpha1", dist.Uniform(0, 1))
    beta1 = numpyro.sample("beta1", dist.Uniform(0, 1 - alpha1))

    def day(variance, shock):
        return alpha0 + alpha1 * shock**2 + beta1 * variance, variance

    _, variance = jax.lax.scan(day, jnp.var(y), y - mu)
    numpyro.sample("y", dist.Normal(mu, jnp.sqrt(variance)), obs=y)


def simulate_garch(rng, n=200):
    variance, y = 1.0, []
    for z in rng.normal(size=n):
        y.append(0.5 + np.sqrt(variance) * z)
        variance = 0.3 + 0.4 * variance * z**2 + 0.4 * variance
    return (np.array(y),)


def _other(model, simulate, dim: int) -> Other:
    return Other(model, simulate(np.random.default_rng(0)), dim)


OTHERS: dict[str, Other] = {
    "mixture": _other(mixture, simulate_mixture, 5),
    "stochastic volatility": _other(stochastic_volatility, simulate_volatility, 23),
    "logistic": _other(logistic, simulate_logistic, 11),
    "poisson effects": _other(poisson_effects, simulate_counts, 12),
    "dirichlet multinomial": _other(dirichlet_multinomial, simulate_shares, 6),
    "correlation": _other(correlation, simulate_gaussian, 9),
    "robust regression": _other(robust_regression, simulate_outliers, 6),
    "garch": _other(garch, simulate_garch, 4),
}
