"""Fits of many data sets of one shape in one process: processor seconds and compiled programs.

    python -m benchmarks.fits
    python -m benchmarks.fits posteriors

Densities: of the first fit and of later ones. Posteriors: of a logistic regression with 5 coefficients for 64 data sets
of 100 rows, fitted together and one after the other (the first of these compiles).
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import ddnf

RESULTS = Path(__file__).parents[1] / "results" / "fits.json"
DATA_SETS, ALONE, DIM = 64, 4, 5


def log_density(x, y, z):
    logits = x @ z
    return jnp.sum(y * logits - jax.nn.softplus(logits)) - jnp.sum(z**2) / 2


def posteriors(compiled: list[str]) -> list[dict]:
    rng, targets, found = np.random.default_rng(0), [], []
    for _ in range(DATA_SETS):
        x, z = rng.normal(size=(100, DIM)), rng.normal(size=DIM)
        y = rng.uniform(size=100) < 1 / (1 + np.exp(-x @ z))
        data = jnp.asarray(x), jnp.asarray(y, float)
        targets.append(ddnf.Target(partial(log_density, *data), DIM))
    for name, work in [("together", targets), *((f"alone, number {k}", targets[k]) for k in range(ALONE))]:
        compiled.clear()
        began = time.process_time()
        if isinstance(work, list):
            fits = ddnf.fit_posteriors(jr.key(0), work, progress=False)
        else:
            fits = [ddnf.fit_posterior(jr.key(0), work, progress=False)]
        seconds = time.process_time() - began
        stages = {stage: sum(fit.stage == stage for fit in fits) for stage in sorted({fit.stage for fit in fits})}
        issues = sum(bool(fit.issues) for fit in fits)
        found.append(dict(fits=name, processor_seconds=seconds, compiled=len(compiled), stages=stages, issues=issues))
        print(found[-1], flush=True)
    return found


def densities(compiled: list[str]) -> list[dict]:
    rng, found = np.random.default_rng(0), []
    for rows in (2000, 6000):
        for number in range(3):
            compiled.clear()
            began = time.process_time()
            x = rng.normal(size=(rows, 3))
            ddnf.fit_density(jr.key(number), x, components=4, steps=200, progress=False)
            seconds = time.process_time() - began
            found.append(dict(rows=rows, fit=number, processor_seconds=seconds, compiled=len(compiled)))
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["densities"])
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: compiled.append(event) if "backend_compile" in event else None
    )
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, function, key in (("densities", densities, "fits"), ("posteriors", posteriors, "posteriors")):
        if name in parser.parse_args().what:
            results |= {"command": "python -m benchmarks.fits densities posteriors", key: function(compiled)}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
