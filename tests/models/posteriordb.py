"""Six posteriors of posteriordb as NumPyro models, their data, their reference draws, and the distance from these.

Written as a user would: data in raw form, and no reparameterisation but the one in the posterior's name.

    posterior, folder = POSTERIORS[name], data_folder()
    draws = ...  # of posterior.model(**posterior.data(folder)): site -> (n, ...)
    errors(posterior.scalars(draws), reference(folder, name))
"""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints


class Posterior(NamedTuple):
    """A model, `data(folder)` that gives its keyword arguments, and the reference's name for each site."""

    model: Callable[..., None]
    data: Callable[[Path], dict[str, Any]]
    names: dict[str, str]

    def scalars(self, draws: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Draws of the sites (n, ...) as draws of scalars (n,), named as in the reference."""
        return scalars({name: draws[site] for site, name in self.names.items()})


def flat(support=constraints.real, event_shape=()):
    return dist.ImproperUniform(support, (), event_shape)


def eight_schools(y, sigma):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(y)):
        z = numpyro.sample("z", dist.Normal(0, 1))
        theta = numpyro.deterministic("theta", mu + tau * z)
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def kidscore_momiq(kid_score, mom_iq):
    intercept = numpyro.sample("intercept", flat())
    slope = numpyro.sample("slope", flat())
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    numpyro.sample("kid_score", dist.Normal(intercept + slope * mom_iq, sigma), obs=kid_score)


def autoregression(y, order=5):
    alpha = numpyro.sample("alpha", dist.Normal(0, 10))
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([order]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    lags = jnp.stack([y[order - k : -k] for k in range(1, order + 1)], axis=1)
    numpyro.sample("y", dist.Normal(alpha + lags @ beta, sigma), obs=y[order:])


def linear_regression(X, y):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(10))
    numpyro.sample("y", dist.Normal(X @ beta, sigma), obs=y)


def gaussian_process(x, y):
    rho = numpyro.sample("rho", dist.Gamma(25, 4))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    kernel = alpha**2 * jnp.exp(-0.5 * ((x[:, None] - x) / rho) ** 2)
    # posteriordb adds sigma to the diagonal, not its square
    cov = kernel + sigma * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(x)), cov), obs=y)


def log_mesquite(weight, diam1, diam2, canopy_height, total_height, density, group):
    beta = numpyro.sample("beta", flat(constraints.real_vector, (7,)))
    sigma = numpyro.sample("sigma", flat(constraints.positive))
    logs = [jnp.log(column) for column in (diam1, diam2, canopy_height, total_height, density)]
    X = jnp.stack([jnp.ones(len(weight)), *logs, group], axis=1)
    numpyro.sample("log_weight", dist.Normal(X @ beta, sigma), obs=jnp.log(weight))


def _read(file: str, columns: str, folder: Path) -> dict[str, np.ndarray]:
    content = json.loads((folder / "posteriordb" / f"{file}.data.json").read_text())
    return {column: np.asarray(content[column], float) for column in columns.split()}


def _posterior(model, file: str, columns: str, names: dict[str, str]) -> Posterior:
    return Posterior(model, partial(_read, file, columns), names)


def _same(sites: str) -> dict[str, str]:
    return {site: site for site in sites.split()}


POSTERIORS: dict[str, Posterior] = {
    "eight_schools-eight_schools_noncentered": _posterior(
        eight_schools, "eight_schools", "y sigma", _same("theta mu tau")
    ),
    "kidiq-kidscore_momiq": _posterior(
        kidscore_momiq,
        "kidiq",
        "kid_score mom_iq",
        {"intercept": "beta[1]", "slope": "beta[2]", "sigma": "sigma"},
    ),
    "arK-arK": _posterior(autoregression, "arK", "y", _same("alpha beta sigma")),
    "sblrc-blr": _posterior(linear_regression, "sblrc", "X y", _same("beta sigma")),
    "gp_pois_regr-gp_regr": _posterior(gaussian_process, "gp_pois_regr", "x y", _same("rho alpha sigma")),
    "mesquite-logmesquite": _posterior(
        log_mesquite,
        "mesquite",
        "weight diam1 diam2 canopy_height total_height density group",
        _same("beta sigma"),
    ),
}


def data_folder() -> Path | None:
    """The folder that holds `posteriordb/`: the variable DDNF_DATA, else `shared/data` beside the checkout."""
    folder = Path(os.environ.get("DDNF_DATA") or Path(__file__).parents[3] / "shared" / "data")
    return folder if (folder / "posteriordb").is_dir() else None


def reference(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The 10000 reference draws of each scalar."""
    with np.load(folder / "posteriordb" / f"{name}.npz", allow_pickle=False) as file:
        draws = file["draws"].reshape(-1, len(file["names"]))
        return {str(scalar): draws[:, i] for i, scalar in enumerate(file["names"])}


def scalars(draws: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays (n, ...) as draws of scalars (n,), named as Stan does: `mu`, `theta[1]`, `L[2,1]`.

    >>> list(scalars({"mu": np.zeros(5), "theta": np.zeros((5, 2))}))
    ['mu', 'theta[1]', 'theta[2]']
    """
    named = {}
    for site, values in draws.items():
        values = np.asarray(values, float)
        for index in np.ndindex(values.shape[1:]):
            label = f"[{','.join(str(i + 1) for i in index)}]" if index else ""
            named[site + label] = values[:, *index]
    return named


class Error(NamedTuple):
    """How far a marginal is off: |difference of means| / reference's deviation, and |ratio of deviations - 1|."""

    mean: float
    sd: float


def errors(
    draws: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], *, weights: np.ndarray | None = None
) -> dict[str, Error]:
    """The error of each scalar of the reference; the draws may carry importance weights (n,).

    >>> errors({"mu": np.array([0.0, 2.0])}, {"mu": np.array([0.0, 1.0])})
    {'mu': Error(mean=1.0, sd=1.0)}
    """
    found = {}
    for name, truth in reference.items():
        mean = np.average(draws[name], weights=weights)
        sd = np.sqrt(np.average((draws[name] - mean) ** 2, weights=weights))
        found[name] = Error(float(abs(mean - truth.mean()) / truth.std()), float(abs(sd / truth.std() - 1)))
    return found
