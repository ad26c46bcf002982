"""Is `fit_posterior` calibrated? Simulation-based calibration of two centred hierarchies, default settings.

python benchmarks/calibration.py [--out results/calibration.json] [--only NAME] [--simulations 50] [--seed 0]

Parameters are drawn from the prior, data given them, and the posterior of each data set is fitted with all that belongs
to a fit, Markov chains included. Where all is exact, the rank of the true parameter among the draws is uniform. The
p-value of a model is the smallest of its parameters times their number (Bonferroni).
"""

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist

import ddnf
from ddnf.posterior import calibrate
from ddnf_paper.record import environment, plain, write

# Draws that are ranked: few enough to be independent where they come from chains.
DRAWS = 99
_GROUP = np.repeat(np.arange(6), 5)
_X = np.random.default_rng(0).normal(size=len(_GROUP))


def means(y):
    """Means of eight groups, three observations each."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    theta = jnp.asarray(numpyro.sample("theta", dist.Normal(mu, tau).expand([8]).to_event(1)))
    numpyro.sample("y", dist.Normal(theta[:, None], 1), obs=y)


def simulate_means(key):
    mu, tau, theta, noise = jr.split(key, 4)
    mu, tau = 2 * jr.normal(mu), jnp.abs(jr.normal(tau))
    theta = mu + tau * jr.normal(theta, (8,))
    return jnp.stack([mu, tau, *theta]), (theta[:, None] + jr.normal(noise, (8, 3)),)


def counts(y):
    """Poisson counts in six groups with a covariate, intercepts centred."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    slope = numpyro.sample("slope", dist.Normal(0, 0.5))
    intercept = jnp.asarray(numpyro.sample("intercept", dist.Normal(mu, tau).expand([6]).to_event(1)))
    numpyro.sample("y", dist.Poisson(jnp.exp(intercept[_GROUP] + slope * _X)), obs=y)


def simulate_counts(key):
    mu, tau, slope, intercept, noise = jr.split(key, 5)
    mu, tau, slope = jr.normal(mu), jnp.abs(jr.normal(tau)), 0.5 * jr.normal(slope)
    intercept = mu + tau * jr.normal(intercept, (6,))
    y = jr.poisson(noise, jnp.exp(intercept[_GROUP] + slope * _X))
    return jnp.stack([mu, tau, slope, *intercept]), (y,)


class Model(NamedTuple):
    """A model, its simulator, and the order of its sites in the vector of parameters."""

    model: Callable[..., None]
    simulate: Callable[[Any], tuple[Any, Any]]
    sites: tuple[str, ...]


MODELS = {
    "normal means": Model(means, simulate_means, ("mu", "tau", "theta")),
    "Poisson counts": Model(counts, simulate_counts, ("mu", "tau", "slope", "intercept")),
}


def judged(model: Model, simulations: int, seed: int) -> dict:
    """The calibration of one model, and what its fits said."""
    start, stages, warned = time.perf_counter(), Counter(), []

    def infer(key, data):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = ddnf.fit_posterior(key, ddnf.from_numpyro(model.model, *data), progress=False)
        stages[posterior.stage] += 1
        warned.extend(posterior.issues)
        draws = posterior.sample(jr.fold_in(key, 1), 10_000)
        columns = [np.asarray(draws[site]).reshape(10_000, -1) for site in model.sites]
        return np.concatenate(columns, axis=1)[:: 10_000 // DRAWS][:DRAWS]

    found = calibrate(jr.key(seed), model.simulate, infer, simulations=simulations, bins=5, progress=False)
    p_value = min(1.0, float(found.p_values.min()) * len(found.p_values))
    return dict(
        simulations=simulations,
        p_value=p_value,
        p_values=found.p_values,
        ranks=found.ranks.astype(int),
        draws=found.draws,
        stages=dict(stages),
        issues=warned,
        seconds=round(time.perf_counter() - start, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "calibration.json")
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--simulations", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    models = json.loads(options.out.read_text())["models"] if options.out.exists() else {}
    for name in MODELS:
        if options.only not in name:
            continue
        models[name] = plain(judged(MODELS[name], options.simulations, options.seed))
        print(name, {key: models[name][key] for key in ("p_value", "stages", "issues", "seconds")}, flush=True)
        command = " ".join(["python benchmarks/calibration.py", *sys.argv[1:]])
        write(options.out, plain(dict(command=command, environment=environment(), models=models)), indented=True)


if __name__ == "__main__":
    main()
