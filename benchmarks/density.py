"""Densities of real tables: `fit_density` with its defaults, FlowJAX's flows, Gaussians, on the same rows.

python benchmarks/density.py --data FOLDER [--out results/density.json] [--tables power miniboone] [--methods ...]

POWER is the excerpt of 34 days (columns, noise as for MAF's POWER; not comparable with published results); MINIBOONE is
trained on MAF's validation rows and tested on its test rows. Of the UCI tables nine tenths train and one tenth tests;
ties are broken by uniform noise of the smallest gap. `patches` are 8 x 8 patches of the Frey faces with uniform noise,
less their mean, without the last pixel, as for BSDS300; test patches are from other images. Each row of the result is
saved when it is done, with wall and process time (of all threads).
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import Invert, RationalQuadraticSpline
from flowjax.distributions import Normal
from flowjax.flows import block_neural_autoregressive_flow, masked_autoregressive_flow
from flowjax.train import fit_to_data
from scipy.stats import multivariate_normal

import ddnf
from ddnf_paper import record as record_file
from ddnf_paper.record import plain

ROOT = Path(__file__).parents[1]


def power(folder):
    """MAF's columns and noise; a tenth of the rows, drawn at random, to test."""
    with np.load(folder / "uci_household_power_excerpt.npz") as file:
        rows = np.delete(file["data"].astype(float), [1, 3], axis=1)
    rng = np.random.default_rng(0)
    rows = rows + rng.uniform(size=rows.shape) * [0.001, 0.01, 1, 1, 1, 1]
    rng.shuffle(rows)
    held = len(rows) // 10
    return rows[held:], rows[:held]


def miniboone(folder):
    with np.load(folder / "miniboone_maf_val_test.npz") as file:
        return file["val"], file["test"]


def uci(name):
    def load(folder):
        with np.load(folder / "uci_tables.npz") as file:
            rows = file[name].astype(float)
        rng = np.random.default_rng(0)
        gaps = np.array([np.diff(np.unique(column)).min() for column in rows.T])
        rows = rows + rng.uniform(size=rows.shape) * gaps
        rng.shuffle(rows)
        held = len(rows) // 10
        return rows[held:], rows[:held]

    return load


def patches(folder, train=40_000, test=5_000):
    with np.load(folder / "freyfaces.npz") as file:
        images = file["images"].astype(float)
    rng, border = np.random.default_rng(0), len(images) * 9 // 10

    def draw(images, count):
        chosen, top, left = (rng.integers(high, size=count) for high in (len(images), 21, 13))
        windows = np.lib.stride_tricks.sliding_window_view(images, (8, 8), axis=(1, 2))
        rows = windows[chosen, top, left].reshape(count, 64)
        rows = (rows + rng.uniform(size=rows.shape)) / 256
        return (rows - rows.mean(axis=1, keepdims=True))[:, :63]

    return draw(images[:border], train), draw(images[border:], test)


def ours(key, train, test):
    density = ddnf.fit_density(key, train, progress=False)
    return np.asarray(density.log_prob(test)), dict(looks=len(density.losses), issues=density.issues)


def unbounded(key, train, test):
    """The default flow without the Lipschitz bound that keeps it from folding."""
    flow_key, fit_key = jr.split(key)
    flow = ddnf.DDNF(flow_key, train.shape[1], blocks=8, steps=2, hidden=(64, 8, 64), activation="softplus")
    density = ddnf.fit_density(fit_key, train, flow=Invert(flow))
    return np.asarray(density.log_prob(test)), dict(looks=len(density.losses), issues=density.issues)


def gaussian(key, train, test):
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    correlation: Any = np.cov(((train - mean) / deviation).T)
    log_p = multivariate_normal.logpdf((test - mean) / deviation, np.zeros(len(mean)), correlation)
    return log_p - np.log(deviation).sum(), {}


def mixture(key, train, test):
    """Full covariances; the number of components is the best of three folds of the training rows."""
    from sklearn.mixture import GaussianMixture
    from sklearn.model_selection import GridSearchCV

    grid = dict(n_components=[k for k in (1, 2, 4, 8, 16, 32, 64) if 20 * k < len(train)])
    search = GridSearchCV(GaussianMixture(reg_covar=1e-5, random_state=0), grid, cv=3)
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    search.fit((train - mean) / deviation)
    log_p = search.best_estimator_.score_samples((test - mean) / deviation) - np.log(deviation).sum()
    return log_p, dict(components=search.best_params_["n_components"])


def spline(key, dim):
    return masked_autoregressive_flow(
        key,
        base_dist=Normal(jnp.zeros(dim)),
        transformer=RationalQuadraticSpline(knots=8, interval=5),
        flow_layers=8,
        nn_width=64,
    )


def bnaf(key, dim):
    return block_neural_autoregressive_flow(key, base_dist=Normal(jnp.zeros(dim)), nn_block_dim=8)


def peer(make):
    """FlowJAX's own training on standardized rows, with early stopping on a tenth of them."""

    def run(key, train, test):
        mean, deviation = train.mean(axis=0), train.std(axis=0)
        flow_key, fit_key = jr.split(key)
        fitted, losses = fit_to_data(
            fit_key,
            make(flow_key, train.shape[1]),
            jnp.asarray((train - mean) / deviation),
            learning_rate=1e-3,
            max_epochs=60,
            max_patience=5,
            batch_size=256,
        )
        log_p = jax.jit(jax.vmap(fitted.log_prob))(jnp.asarray((test - mean) / deviation))
        return np.asarray(log_p) - np.log(deviation).sum(), dict(looks=len(losses["val"]))

    return run


UCI = ("wine_white", "energy", "concrete", "protein")
TABLES = dict(power=power, miniboone=miniboone, patches=patches) | {name: uci(name) for name in UCI}
METHODS = {
    "ours": ours,
    "ours, unbounded": unbounded,
    "FlowJAX spline MAF": peer(spline),
    "FlowJAX BNAF": peer(bnaf),
    "Gaussian mixture": mixture,
    "Gaussian": gaussian,
}


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("DDNF_DATA") or ROOT.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "density.json")
    parser.add_argument("--tables", nargs="+", default=TABLES)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    record_file.check_record(options.out)
    if not (Path(options.data) / "miniboone_maf_val_test.npz").exists():
        parser.error(f"Expected the tables in {str(options.data)!r}; set --data or DDNF_DATA.")
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    for table in options.tables:
        train, test = TABLES[table](options.data)
        for method in options.methods:
            if any((r["table"], r["method"], r["seed"]) == (table, method, options.seed) for r in rows):
                continue
            start, used = time.perf_counter(), time.process_time()
            log_p, more = METHODS[method](jr.key(options.seed), train, test)
            figures = dict(test=float(log_p.mean()), error=float(log_p.std() / np.sqrt(len(log_p))), **more)
            times = dict(seconds=time.perf_counter() - start, process_seconds=time.process_time() - used)
            rows.append(dict(table=table, method=method, seed=options.seed, **figures, **times))
            print(rows[-1], flush=True)
            record = dict(command="python benchmarks/density.py", versions=dict(jax=jax.__version__), rows=rows)
            record_file.write(options.out, plain(record), indented=True)


if __name__ == "__main__":
    main()
