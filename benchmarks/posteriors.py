"""A scoreboard of posteriors: ours, nutpie, NumPyro's NUTS and guides, by distance from known moments and by time.

python benchmarks/posteriors.py [--out results/posteriors.json] [--only NAME] [--methods ours nutpie ...] [--seeds 0 1]

Posteriors of posteriordb with reference draws, and densities with known moments: funnels, several modes, heavy tails,
1,000 dimensions. Each row is saved when it is done and not computed again. Each runs in its own process, so that its
time is what a user waits for: from the model to 10,000 draws, compilation included. Seconds of the processor are given
too, since other programs may run on the same cores.

GOOD: every mean within 0.05 deviations and every deviation within 5 % of the reference, plus three Monte Carlo errors.
Otherwise WARNED if the method said that something is wrong (an issue; R-hat above 1.01; divergences), else SILENT.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax
import jax.random as jr
import numpy as np
import numpyro
import optax
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, autoguide
from tests.models.cases import HARD, Case, funnel, gaussian, judge
from tests.models.harder import ALL, moments
from tests.models.posteriordb import data_folder, scalars

import ddnf
from ddnf.posterior import convergence
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
METHODS = ("ours", "nutpie", "NUTS", *GUIDES)


def _wide(dim=1000, condition=1e4):
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(dim, dim)))[0]
    return gaussian(np.ones(dim), basis @ np.diag(np.geomspace(1, condition, dim)) @ basis.T)


def densities() -> dict[str, Case]:
    """Densities with known moments."""
    names = ("funnel", "rosenbrock, five pairs", "two modes", "two modes, 10 dimensions", "ring of eight")
    found = {name: HARD[name] for name in (*names, "eight modes, 10 dimensions", "student in 10 dimensions")}
    return found | {"funnel in 100 dimensions": funnel(100, 3.0), "normal in 1,000 dimensions": _wide()}


class Draws(NamedTuple):
    """Draws of scalars by name (n,), their smallest effective number, whether the method complained, and figures."""

    scalars: dict[str, np.ndarray]
    ess: float
    is_warned: bool
    figures: dict


def ours(target, seed) -> Draws:
    """`fit_posterior` with its defaults."""
    posterior = ddnf.fit_posterior(jr.key(seed), target, progress=False)
    chains = posterior.chains
    ess = DRAWS if chains is None else chains.ess
    figures = dict(khat=posterior.khat, gradients=posterior.gradients, stage=posterior.stage)
    figures |= dict(issues=list(posterior.issues), log_evidence=posterior.log_evidence)
    if chains is not None:
        figures |= dict(rhat=chains.rhat, divergences=chains.divergences)
    return Draws(_scalars(posterior.sample(jr.key(seed + 1), DRAWS)), ess, bool(posterior.issues), figures)


def nutpie(target, seed) -> Draws:
    """nutpie's defaults on the same log density: 4 chains, 2,500 draws each."""
    import nutpie  # pyright: ignore[reportMissingImports]
    from nutpie.compiled_pyfunc import from_pyfunc  # pyright: ignore[reportMissingImports]

    density = jax.jit(jax.value_and_grad(target.log_density))

    def evaluate(x):
        value, gradient = density(np.asarray(x, jax.numpy.result_type(float)))
        return float(value), np.asarray(gradient, float)

    model = from_pyfunc(
        target.dim,
        lambda: evaluate,
        lambda *_: lambda x: {"z": np.asarray(x, float)},
        [np.dtype("float64")],
        [(target.dim,)],
        ["z"],
        make_initial_point_fn=lambda seed: np.asarray(target.start(jr.key(int(seed) % 2**31)), float),
    )
    trace: Any = nutpie.sample(model, chains=4, draws=2500, seed=seed, progress_bar=False)
    steps, diverging = (np.asarray(trace.sample_stats[name]) for name in ("n_steps", "diverging"))
    return _chains(target, np.asarray(trace.posterior["z"]), int(steps.sum()), int(diverging.sum()))


def nuts(target, seed) -> Draws:
    """NumPyro's defaults: four chains one after another, 1,000 + 1,250 draws each."""
    kernel = NUTS(potential_fn=lambda z: -target.log_density(z))
    sampler = MCMC(kernel, num_warmup=1000, num_samples=1250, num_chains=4, progress_bar=False)
    starts = np.stack([target.start(jr.fold_in(jr.key(seed), i)) for i in range(4)])
    options: dict[str, Any] = dict(init_params=np.asarray(starts, jax.numpy.result_type(float)))
    sampler.run(jr.key(seed), extra_fields=("diverging", "num_steps"), **options)
    extra = sampler.get_extra_fields()
    found = np.asarray(sampler.get_samples(group_by_chain=True))
    return _chains(target, found, int(1.8 * extra["num_steps"].sum()), int(extra["diverging"].sum()))


def _chains(target, z, gradients, divergences) -> Draws:
    found = convergence(z)
    rhat, ess = float(found.rhat.max()), float(min(found.ess_bulk.min(), found.ess_tail.min()))
    flat = np.asarray(z.reshape(-1, z.shape[-1]), jax.numpy.result_type(float))
    draws = flat if target.constrain is None else jax.jit(jax.vmap(target.constrain))(flat)
    figures = dict(rhat=rhat, gradients=gradients, divergences=divergences)
    return Draws(_scalars(draws), ess, bool(rhat > 1.01 or divergences), figures)


def guided(make, name, seed) -> Draws:
    """5,000 steps of Adam with 16 draws each, and a rate that falls from 0.01 by a cosine."""
    posterior = ALL[name]
    model, data = posterior.model, posterior.data(_folder())
    guide = make(model)
    optimizer = numpyro.optim.optax_to_numpyro(optax.adam(optax.cosine_decay_schedule(1e-2, 5000)))
    svi = SVI(model, guide, optimizer, Trace_ELBO(num_particles=16))
    result = svi.run(jr.key(seed), 5000, progress_bar=False, **data)
    latent = guide.sample_posterior(jr.key(seed + 1), result.params, sample_shape=(DRAWS,))
    draws = latent | Predictive(model, latent)(jr.key(0), **data)
    return Draws(_scalars(draws), DRAWS, False, dict(gradients=80_000, loss=float(result.losses[-100:].mean())))


def _scalars(draws):
    return scalars({name: np.asarray(v) for name, v in (draws if isinstance(draws, dict) else {"z": draws}).items()})


def _folder() -> Path:
    folder = data_folder()
    if folder is None:
        raise SystemExit("Expected the posteriordb data; set DDNF_DATA to its folder.")
    return folder


def row(method, name, seed):
    start, used = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if method in GUIDES:
            found = guided(GUIDES[method], name, seed)
        else:
            found = dict(ours=ours, nutpie=nutpie, NUTS=nuts)[method](_target(name), seed)
    seconds = dict(seconds=time.perf_counter() - start, processor_seconds=time.process_time() - used)
    mean, deviation, verdict = _judged(name, found)
    figures = dict(verdict=verdict, **seconds, mean=mean, deviation=deviation, ess=found.ess, **found.figures)
    return dict(posterior=name, method=method, seed=seed, **figures)


def _target(name) -> ddnf.Target:
    if name in ALL:
        return ddnf.from_numpyro(ALL[name].model, **ALL[name].data(_folder()))
    case = densities()[name]
    return ddnf.Target(case.log_density, case.dim)


def _judged(name, found: Draws) -> tuple[float, float, str]:
    """The worst errors of means and deviations, and the verdict."""
    kurtosis = None
    if name in ALL:
        names, mean, deviation = moments(_folder(), name)
        draws = np.stack([_renamed(name, found.scalars)[scalar] for scalar in names])
    else:
        case = densities()[name]
        assert case.mean is not None and case.deviation is not None
        mean, deviation, kurtosis = case.mean, case.deviation, case.kurtosis
        draws = np.stack(list(found.scalars.values()))
    judged = judge(draws.T, mean, deviation, ess=found.ess, tolerance=0.05, kurtosis=kurtosis)
    verdict = "GOOD" if judged.is_right else "WARNED" if found.is_warned else "SILENT"
    return judged.mean, judged.deviation, verdict


def _renamed(name, draws):
    """Scalars as the reference names them."""
    sites = ALL[name].names
    parts = {site: [key for key in draws if key.split("[")[0] == site] for site in sites}
    flat = {}
    for site, target in sites.items():
        for key in parts[site]:
            flat[target + key[len(site) :]] = draws[key]
    return flat


def results_table(rows):
    """Verdict, worst error of a mean in reference deviations and of a deviation, seconds; the worst of all seeds."""

    def cell(name, method):
        found = [r for r in rows if (r["posterior"], r["method"]) == (name, method)]
        if not found:
            return ""
        verdicts = " ".join(r["verdict"] for r in found)
        worst = {key: max((r[key] for r in found if r[key] is not None), default=None) for key in ("mean", "deviation")}
        seconds = max(r["seconds"] for r in found)
        return f"{verdicts}; {formatted(worst, 'mean', '.3f')}, {formatted(worst, 'deviation', '.1%')}; {seconds:.0f} s"

    methods = [m for m in METHODS if any(r["method"] == m for r in rows)]
    lines = [(name, *(cell(name, method) for method in methods)) for name in names()]
    return markdown_table(("posterior", *methods), lines)


def names() -> list[str]:
    return [*ALL, *densities()]


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "posteriors.json")
    parser.add_argument("--only", default="")
    parser.add_argument("--methods", nargs="+", default=["ours", "nutpie", "NUTS"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--again", action="store_true", help="compute rows again that are there")
    parser.add_argument("--row", nargs=2, metavar=("METHOD", "POSTERIOR"), help="compute one row and print it")
    options = parser.parse_args()
    record_file.check_record(options.out)
    if options.row:
        method, name = options.row
        print(json.dumps(plain(row(method, name, options.seeds[0])), allow_nan=False))
        return
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    wanted = [n for n in names() if options.only in n]
    for name, method, seed in product(wanted, options.methods, options.seeds):
        if method in GUIDES and name not in ALL:
            continue
        done = [r for r in rows if (r["posterior"], r["method"], r["seed"]) == (name, method, seed)]
        if done and not options.again:
            continue
        command = [sys.executable, __file__, "--row", method, name, "--seeds", str(seed)]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            print(name, method, seed, "failed:", process.stderr.strip().splitlines()[-1:], flush=True)
            continue
        rows = [r for r in rows if r not in done] + [json.loads(process.stdout.splitlines()[-1])]
        print({key: value for key, value in rows[-1].items() if key != "issues"}, flush=True)
        versions = dict(ddnf=ddnf.__version__, jax=jax.__version__, numpyro=numpyro.__version__)
        record = dict(command="python benchmarks/posteriors.py", versions=versions, rows=rows)
        record_file.write(options.out, plain(record), indented=True)
    print(results_table(rows))


if __name__ == "__main__":
    main()
