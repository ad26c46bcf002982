"""How long a user waits for a posterior: `fit_posterior` and nutpie in turns, from the model to 10,000 draws.

python benchmarks/waiting.py [--out results/waiting.json] [--cores 1] [--repeats 3]

Six posteriors of posteriordb, as NumPyro models for ours and PyMC models for nutpie (4 chains, 2,500 draws), each fit
in a fresh process, imports not counted. Cold: empty caches of compiled programs for both. Warm: nutpie has fitted the
same model before; ours has fitted *another* model of the same dimension, a regression with as many coefficients.
Needs nutpie: pip install nutpie. `--cores 1` pins every process to one core.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
from tests.models.posteriordb import POSTERIORS, data_folder, errors, reference

from ddnf_paper import record as record_file
from ddnf_paper.record import plain

DRAWS = 10_000


def _schools(pm, y, sigma):
    mu, tau = pm.Normal("mu", 0, 5), pm.HalfCauchy("tau", 5)
    theta = pm.Deterministic("theta", mu + tau * pm.Normal("z", 0, 1, shape=len(y)))
    pm.Normal("y", theta, sigma, observed=y)


def _kids(pm, kid_score, mom_iq):
    intercept, slope, sigma = pm.Flat("intercept"), pm.Flat("slope"), pm.HalfCauchy("sigma", 2.5)
    pm.Normal("kid_score", intercept + slope * mom_iq, sigma, observed=kid_score)


def _autoregression(pm, y, order=5):
    alpha, beta = pm.Normal("alpha", 0, 10), pm.Normal("beta", 0, 10, shape=order)
    sigma = pm.HalfCauchy("sigma", 2.5)
    lags = np.stack([y[order - k : -k] for k in range(1, order + 1)], axis=1)
    pm.Normal("y", alpha + lags @ beta, sigma, observed=y[order:])


def _regression(pm, X, y):
    beta, sigma = pm.Normal("beta", 0, 10, shape=X.shape[1]), pm.HalfNormal("sigma", 10)
    pm.Normal("y", X @ beta, sigma, observed=y)


def _process(pm, x, y):
    rho, alpha, sigma = pm.Gamma("rho", 25, 4), pm.HalfNormal("alpha", 2), pm.HalfNormal("sigma", 1)
    covariance = alpha**2 * pm.math.exp(-0.5 * ((x[:, None] - x) / rho) ** 2) + sigma * np.eye(len(x))
    pm.MvNormal("y", np.zeros(len(x)), cov=covariance, observed=y)


def _mesquite(pm, weight, diam1, diam2, canopy_height, total_height, density, group):
    beta, sigma = pm.Flat("beta", shape=7), pm.HalfFlat("sigma")
    logs = [np.log(column) for column in (diam1, diam2, canopy_height, total_height, density)]
    columns = np.stack([np.ones(len(weight)), *logs, group], axis=1)
    pm.Normal("weight", columns @ beta, sigma, observed=np.log(weight))


PYMC = dict(zip(POSTERIORS, (_schools, _kids, _autoregression, _regression, _process, _mesquite), strict=True))


def ours(name: str, folder: Path) -> dict:
    import jax
    import jax.random as jr
    import numpyro  # noqa: F401

    import ddnf

    data = POSTERIORS[name].data(folder)
    start = time.perf_counter()
    target = ddnf.from_numpyro(POSTERIORS[name].model, **data)
    posterior = ddnf.fit_posterior(jr.key(0), target, progress=False)
    draws = jax.block_until_ready(posterior.sample(jr.key(1), DRAWS))
    seconds = time.perf_counter() - start
    found = errors(POSTERIORS[name].scalars(draws), reference(folder, name)).values()
    worst = dict(mean=max(error.mean for error in found), deviation=max(error.sd for error in found))
    return dict(seconds=seconds, **worst, gradients=posterior.gradients, stage=posterior.stage)


def nutpie(name: str, folder: Path) -> dict:
    import nutpie  # pyright: ignore[reportMissingImports]
    import pymc as pm

    data: dict[str, Any] = {key: np.asarray(value) for key, value in POSTERIORS[name].data(folder).items()}
    start = time.perf_counter()
    with pm.Model() as model:
        PYMC[name](pm, **data)
    trace = nutpie.sample(nutpie.compile_pymc_model(model), chains=4, draws=DRAWS // 4, seed=0, progress_bar=False)
    seconds = time.perf_counter() - start
    return dict(seconds=seconds, gradients=int(np.asarray(trace.sample_stats["n_steps"]).sum()))


def warm(dim: int) -> None:
    """A fit of another model of this dimension, which fills the cache of compiled programs."""
    import jax.numpy as jnp
    import jax.random as jr
    import numpyro
    import numpyro.distributions as dist

    import ddnf

    rng = np.random.default_rng(dim)
    x, y = rng.normal(size=(30, dim)), rng.integers(0, 2, 30)

    def model(x, y):
        weight = numpyro.sample("weight", dist.StudentT(4, 0, 3).expand([dim]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=jnp.asarray(x) @ weight), obs=y)

    ddnf.fit_posterior(jr.key(1), ddnf.from_numpyro(model, x, y), exact="never", progress=False).sample(jr.key(2), 10)


def _run(arguments: list[str], cache: Path, cores: int) -> dict:
    flags = f"base_compiledir={cache / 'pytensor'}"
    places = dict(DDNF_CACHE=str(cache / "jax"), NUMBA_CACHE_DIR=str(cache / "numba"), PYTENSOR_FLAGS=flags)
    pin = ["taskset", "-c", "0"] if cores == 1 else []
    command = [*pin, sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=os.environ | places, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _median(rows: list[dict]) -> dict:
    seconds = [row["seconds"] for row in rows]
    return rows[-1] | dict(seconds=statistics.median(seconds), all_seconds=seconds)


def measure(name: str, cores: int, repeats: int) -> list[dict]:
    """Rows of one posterior: both methods in turns, cold and warm."""
    rows = []
    for state in ("cold", "warm"):
        found: dict[str, list[dict]] = {"ours": [], "nutpie": []}
        folder = Path(tempfile.mkdtemp())
        if state == "warm":
            _run(["--warm", name], folder, cores)
            _run(["--one", "nutpie", name], folder, cores)
        for number in range(repeats):
            for method, results in found.items():
                cache = folder
                if state == "cold" or method == "ours":
                    cache = folder / f"{method}-{number}"
                if state == "warm" and method == "ours":  # it finds what the other model left, not its own last fit
                    shutil.copytree(folder / "jax", cache / "jax")
                results.append(_run(["--one", method, name], cache, cores))
        shutil.rmtree(folder)
        rows += [dict(posterior=name, method=m, caches=state, cores=cores, **_median(r)) for m, r in found.items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "waiting.json")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "POSTERIOR"), help="fit once and print the row")
    parser.add_argument("--warm", metavar="POSTERIOR", help="fit another model of the dimension of this one")
    options = parser.parse_args()
    folder = data_folder()
    if folder is None:
        raise SystemExit("Expected the posteriordb data; set DDNF_DATA to its folder.")
    if options.one or options.warm:
        print(json.dumps(plain(_child(options, folder)), allow_nan=False))
        return
    record_file.check_record(options.out)
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    for name in (n for n in POSTERIORS if options.only in n):
        rows = [r for r in rows if (r["posterior"], r["cores"]) != (name, options.cores)]
        rows += measure(name, options.cores, options.repeats)
        for row in rows[-4:]:
            print({key: row[key] for key in ("posterior", "method", "caches", "seconds", "gradients")}, flush=True)
        record = dict(command=f"python benchmarks/waiting.py --repeats {options.repeats}", rows=rows)
        record_file.write(options.out, plain(record), indented=True)


def _child(options, folder: Path) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if options.one and options.one[0] == "nutpie":
            return nutpie(options.one[1], folder)
        import ddnf

        ddnf.cache_compilation()
        if options.one:
            return ours(options.one[1], folder)
        data = POSTERIORS[options.warm].data(folder)
        warm(ddnf.from_numpyro(POSTERIORS[options.warm].model, **data).dim)
        return {}


if __name__ == "__main__":
    main()
