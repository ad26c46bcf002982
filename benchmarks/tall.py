"""Hierarchical logistic regression with up to 1,000,000 rows, 20 coefficients and 100 group effects, beside NUTS.

    python -m benchmarks.tall --rows 1000000

NumPyro's NUTS runs where it takes minutes. With more rows its time is extrapolated: gradients per iteration of the run
with fewer rows, times the time of one gradient. The reference is then not NUTS but importance weights of all rows, at
fresh draws of the fit. Times are those of the processor (all on one core), which other programs on the machine do not
change.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from numpyro.infer.util import initialize_model

import ddnf

COEFFICIENTS, GROUPS = 20, 100
RESULTS = Path(__file__).parents[1] / "results" / "tall.json"
# Above this many rows NUTS is extrapolated.
LARGEST = 100_000
# Times of NUTS are for one chain of 1,000 iterations to warm up and 1,000 draws.
ITERATIONS = 2000


def simulate(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, COEFFICIENTS)).astype(np.float32)
    group = rng.integers(0, GROUPS, rows).astype(np.int32)
    beta, effect = rng.normal(size=COEFFICIENTS) / 2, 0.7 * rng.normal(size=GROUPS)
    y = (rng.uniform(size=rows) < 1 / (1 + np.exp(-x @ beta - effect[group]))).astype(np.float32)
    return x, group, y


def model(x, group, y):
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([COEFFICIENTS]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", GROUPS):
        effect = numpyro.sample("effect", dist.Normal(0.0, scale))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta + jnp.asarray(effect)[group]), obs=y)


def flat(draws: dict, count: int) -> np.ndarray:
    return np.concatenate([np.asarray(draws[name]).reshape(count, -1) for name in sorted(draws)], axis=1)


def fit(data) -> tuple[ddnf.Posterior, float]:
    began = time.process_time()
    posterior = ddnf.fit_posterior(jr.key(0), ddnf.from_numpyro(model, *data), progress=False)
    return posterior, time.process_time() - began


def nuts(data, warmup: int, draws: int) -> tuple[np.ndarray, float, int]:
    """Draws, seconds of the processor, and gradients."""
    began = time.process_time()
    data = tuple(map(jnp.asarray, data))
    sampler = numpyro.infer.MCMC(numpyro.infer.NUTS(model), num_warmup=warmup, num_samples=draws, progress_bar=False)
    sampler.warmup(jr.key(1), *data, extra_fields=("num_steps",), collect_warmup=True)
    steps = int(np.sum(sampler.get_extra_fields()["num_steps"]))
    sampler.run(jr.key(2), *data, extra_fields=("num_steps",))
    steps += int(np.sum(sampler.get_extra_fields()["num_steps"]))
    return flat(sampler.get_samples(), draws), time.process_time() - began, steps


def seconds_of_gradient(data) -> float:
    """Of one gradient of NumPyro's potential, in a compiled loop as in NUTS."""
    data = tuple(map(jnp.asarray, data))
    info = initialize_model(jr.key(0), model, model_args=data, dynamic_args=True)
    point, unravel = ravel_pytree(info.param_info.z)
    count = 20

    @jax.jit
    def repeat(z, data):
        gradient = jax.grad(lambda z: info.potential_fn(*data)(unravel(z)))
        return jax.lax.fori_loop(0, count, lambda _, z: z - 1e-12 * gradient(z), z)

    jax.block_until_ready(repeat(point, data))
    began = time.process_time()
    jax.block_until_ready(repeat(point, data))
    return (time.process_time() - began) / count


def weighted(posterior, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation by importance weights of all rows."""
    draws, weights = posterior.importance_sample(jr.key(7), count, weighted=True)
    values, weights = flat(draws, count), np.asarray(weights, float)[:, None]
    mean = np.sum(weights * values, axis=0)
    return mean, np.sqrt(np.sum(weights * (values - mean) ** 2, axis=0))


def compare(rows: int, known: dict | None, draws: int) -> dict:
    data = simulate(rows)
    posterior, seconds = fit(data)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found = flat(posterior.sample(jr.key(3), 20_000), 20_000)
    result = dict(rows=rows, seconds=seconds, memory_gb=memory, ess=posterior.ess, khat=posterior.khat)
    result |= dict(issues=list(posterior.issues), log=str(posterior.log).splitlines())
    each = seconds_of_gradient(data)
    if rows <= LARGEST:
        reference, nuts_seconds, gradients = nuts(data, draws // 3, draws)
        mean, deviation = reference.mean(axis=0), reference.std(axis=0)
        iterations = draws + draws // 3
        result |= dict(reference=f"NUTS, {draws} draws", gradients_per_iteration=gradients / iterations)
        result |= dict(nuts_seconds=nuts_seconds * ITERATIONS / iterations)
    else:
        mean, deviation = weighted(posterior, 4000)
        steps = known["gradients_per_iteration"] if known is not None else 0.0
        result |= dict(reference="importance weights of all rows at 4000 draws", gradients_per_iteration=steps)
        result |= dict(nuts_seconds=ITERATIONS * steps * each, nuts="extrapolated from the time of a gradient")
    shift, ratio = np.abs(found.mean(axis=0) - mean) / deviation, np.abs(found.std(axis=0) / deviation - 1)
    result |= dict(seconds_of_gradient=each, largest_shift=shift.max(), typical_shift=np.median(shift))
    return result | dict(largest_change_of_deviation=ratio.max(), typical_change_of_deviation=np.median(ratio))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 50_000, 1_000_000])
    parser.add_argument("--draws", type=int, default=2000, help="draws of NUTS, after a third as many to warm up")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: list[dict] = json.loads(options.output.read_text())["results"] if options.output.exists() else []
    for rows in options.rows:
        known = max((r for r in results if r["rows"] <= LARGEST), key=lambda r: r["rows"], default=None)
        new = compare(rows, known, options.draws)
        results = sorted([*(r for r in results if r["rows"] != rows), new], key=lambda r: r["rows"])
        text = dict(command="python -m benchmarks.tall", results=results)
        rounded = json.loads(json.dumps(text, default=float), parse_float=lambda number: float(f"{float(number):.4g}"))
        options.output.write_text(json.dumps(rounded, indent=1, allow_nan=False) + "\n")
        print(json.dumps({name: value for name, value in new.items() if name != "log"}, default=float, indent=1))
        print("\n".join(new["log"]))


if __name__ == "__main__":
    main()
