"""Six posteriors of posteriordb: ours, NumPyro's guides and NUTS, by their distance from reference draws and by time.

python benchmarks/posteriors.py [--out results/posteriors.json] [--only NAME] [--methods ours nuts ...]

Each row is saved when it is done and not computed again. Each runs in its own process, so that its time is what a user
waits for: from the model to 10,000 draws, compilation included.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax
import jax.random as jr
import numpy as np
import numpyro
import optax
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, autoguide
from tests.models.posteriordb import POSTERIORS, data_folder, errors, reference

import ddnf
from ddnf_paper import record as record_file
from ddnf_paper.record import plain
from ddnf_paper.text import formatted, markdown_table

DRAWS = 10_000
GUIDES = dict(
    AutoNormal=autoguide.AutoNormal,
    AutoMultivariateNormal=autoguide.AutoMultivariateNormal,
    AutoIAFNormal=partial(autoguide.AutoIAFNormal, num_flows=3, hidden_dims=[32, 32]),
    AutoBNAFNormal=autoguide.AutoBNAFNormal,
)
METHODS = ("ours", "NUTS", *GUIDES)


def ours(model, data, seed):
    """`fit_posterior` with its defaults; draws of the fit, not importance-weighted."""
    posterior = ddnf.fit_posterior(jr.key(seed), ddnf.from_numpyro(model, **data), progress=False)
    figures = dict(khat=posterior.khat, ess=posterior.ess, elbo=posterior.elbo, issues=list(posterior.issues))
    return posterior.sample(jr.key(seed + 1), DRAWS), figures


def nuts(model, data, seed):
    """Four chains, one after another, 1,000 + 1,250 draws each, NumPyro's defaults."""
    sampler = MCMC(NUTS(model), num_warmup=1000, num_samples=1250, num_chains=4, progress_bar=False)
    sampler.run(jr.key(seed), **data)
    return sampler.get_samples(), dict(divergences=int(sampler.get_extra_fields()["diverging"].sum()))


def guided(make, model, data, seed):
    """5,000 steps of Adam with 16 draws each, and a rate that falls from 0.01 by a cosine."""
    guide = make(model)
    optimizer = numpyro.optim.optax_to_numpyro(optax.adam(optax.cosine_decay_schedule(1e-2, 5000)))
    svi = SVI(model, guide, optimizer, Trace_ELBO(num_particles=16))
    result = svi.run(jr.key(seed), 5000, progress_bar=False, **data)
    latent = guide.sample_posterior(jr.key(seed + 1), result.params, sample_shape=(DRAWS,))
    draws = latent | Predictive(model, latent)(jr.key(0), **data)
    return draws, dict(loss=float(result.losses[-100:].mean()))


def row(method, name, seed):
    posterior, folder = POSTERIORS[name], data_folder()
    if folder is None:
        raise SystemExit("Expected the posteriordb data; set DDNF_DATA to its folder.")
    run = dict(ours=ours, NUTS=nuts).get(method) or partial(guided, GUIDES[method])
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draws, figures = run(posterior.model, posterior.data(folder), seed)
    seconds = time.perf_counter() - start
    found = errors(posterior.scalars({k: np.asarray(v) for k, v in draws.items()}), reference(folder, name))
    # NumPy's maximum propagates NaN, the worst result of all.
    mean, deviation = np.max([(e.mean, e.sd) for e in found.values()], axis=0).tolist()
    return dict(posterior=name, method=method, seed=seed, seconds=seconds, mean=mean, deviation=deviation, **figures)


def results_table(rows):
    """Worst error of a mean in reference deviations, worst relative error of a deviation, seconds."""

    def cell(name, method):
        found = [r for r in rows if (r["posterior"], r["method"]) == (name, method)]
        shown = dict(mean=".3f", deviation=".1%", seconds=".0f")
        return "; ".join(", ".join(formatted(r, key, form) or "NaN" for key, form in shown.items()) for r in found)

    lines = [(name, *(cell(name, method) for method in METHODS)) for name in POSTERIORS]
    return markdown_table(("posterior", *METHODS), lines)


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "posteriors.json")
    parser.add_argument("--only", default="")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--row", nargs=2, metavar=("METHOD", "POSTERIOR"), help="compute one row and print it")
    options = parser.parse_args()
    record_file.check_record(options.out)
    if options.row:
        method, name = options.row
        print(json.dumps(plain(row(method, name, options.seed)), allow_nan=False))
        return
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    for name in (n for n in POSTERIORS if options.only in n):
        for method in options.methods:
            if any((r["posterior"], r["method"], r["seed"]) == (name, method, options.seed) for r in rows):
                continue
            command = [sys.executable, __file__, "--row", method, name, "--seed", str(options.seed)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
            versions = dict(ddnf=ddnf.__version__, jax=jax.__version__, numpyro=numpyro.__version__)
            record = dict(command="python benchmarks/posteriors.py", versions=versions, rows=rows)
            record_file.write(options.out, plain(record), indented=True)
    print(results_table(rows))


if __name__ == "__main__":
    main()
