"""Densities of real tables: `fit_density` with its defaults, FlowJAX's flows, mixtures, kernels, on the same rows.

python benchmarks/density.py --data FOLDER [--out results/density.json] [--tables power] [--methods ours] [--seeds 0 1]

The seed decides the split of the rows, the noise and the fit. POWER is the excerpt of 34 days (columns, noise as for
MAF's POWER; not comparable with published results); MINIBOONE is trained on MAF's validation rows and tested on its
test rows, whatever the seed. Of the UCI tables nine tenths train and one tenth tests; ties are broken by uniform noise
of the smallest gap. `patches` are 20,000 patches of 8 x 8 pixels of the Frey faces with uniform noise, less their mean,
without the last pixel, as for BSDS300; test patches are from other images. Each row of the result is saved when it is
done, with wall and process time (of all threads) of the fit and the scores, compilation included. Rows that are marked
as those of older code are computed again. A fit that takes more than --limit process seconds is stopped, and its row
has no likelihood.
"""

import argparse
import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import RationalQuadraticSpline
from flowjax.distributions import Normal
from flowjax.flows import block_neural_autoregressive_flow, coupling_flow, masked_autoregressive_flow
from flowjax.train import fit_to_data
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

import ddnf
from ddnf_paper import record as record_file
from ddnf_paper.record import plain

ROOT = Path(__file__).parents[1]


def power(folder, seed):
    """MAF's columns and noise; a tenth of the rows, drawn at random, to test."""
    with np.load(folder / "uci_household_power_excerpt.npz") as file:
        rows = np.delete(file["data"].astype(float), [1, 3], axis=1)
    rng = np.random.default_rng(seed)
    rows = rows + rng.uniform(size=rows.shape) * [0.001, 0.01, 1, 1, 1, 1]
    rng.shuffle(rows)
    held = len(rows) // 10
    return rows[held:], rows[:held]


def miniboone(folder, seed):
    with np.load(folder / "miniboone_maf_val_test.npz") as file:
        return file["val"], file["test"]


def uci(name):
    def load(folder, seed):
        with np.load(folder / "uci_tables.npz") as file:
            rows = file[name].astype(float)
        rng = np.random.default_rng(seed)
        gaps = np.array([np.diff(np.unique(column)).min() for column in rows.T])
        rows = rows + rng.uniform(size=rows.shape) * gaps
        rng.shuffle(rows)
        held = len(rows) // 10
        return rows[held:], rows[:held]

    return load


def patches(folder, seed, train=20_000, test=5_000):
    with np.load(folder / "freyfaces.npz") as file:
        images = file["images"].astype(float)
    rng, border = np.random.default_rng(seed), len(images) * 9 // 10

    def draw(images, count):
        chosen, top, left = (rng.integers(high, size=count) for high in (len(images), 21, 13))
        windows = np.lib.stride_tricks.sliding_window_view(images, (8, 8), axis=(1, 2))
        rows = windows[chosen, top, left].reshape(count, 64)
        rows = (rows + rng.uniform(size=rows.shape)) / 256
        return (rows - rows.mean(axis=1, keepdims=True))[:, :63]

    return draw(images[:border], train), draw(images[border:], test)


def ours(key, train, test):
    density = ddnf.fit_density(key, train, progress=False)
    log_p = np.asarray(density.log_prob(test))
    return log_p, dict(looks=len(density.losses), issues=density.issues, folds=lambda: _folds(density, test))


def _folds(density, test, count=200):
    """The share of test rows at which the map to the base is not shown to keep its orientation.

    By the sign of the determinant of its Jacobian, from automatic differentiation. A row counts as a fold if its sign
    is not that of most rows, or if there is none (zero, NaN or infinite entries). By construction there is no fold:
    each part of a default flow is increasing in one column given the columns before it, or a bounded `DDNF`.
    """
    u = jnp.asarray(np.linalg.solve(density.scale, (test[:count] - density.mean).T).T, jnp.result_type(float))
    jacobians = np.asarray(jax.jit(jax.vmap(jax.jacfwd(density.flow.inverse)))(u), float)
    is_finite = np.isfinite(jacobians).all(axis=(1, 2), keepdims=True)
    signs = np.linalg.slogdet(np.where(is_finite, jacobians, 0.0))[0]
    most = 1.0 if np.sum(signs > 0) >= np.sum(signs < 0) else -1.0
    return float(np.mean(signs != most))


def gaussian(key, train, test):
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    correlation: Any = np.cov(((train - mean) / deviation).T)
    log_p = multivariate_normal.logpdf((test - mean) / deviation, np.zeros(len(mean)), correlation)
    return log_p - np.log(deviation).sum(), {}


def mixture(key, train, test):
    """Full covariances; the number of components is the best of three folds of at most 10,000 training rows."""
    from sklearn.mixture import GaussianMixture
    from sklearn.model_selection import GridSearchCV

    mean, deviation = train.mean(axis=0), train.std(axis=0)
    rows = (train - mean) / deviation
    some = rows[:10_000]
    grid = dict(n_components=[k for k in (1, 2, 4, 8, 16, 32, 64) if 20 * k < len(some)])
    search = GridSearchCV(GaussianMixture(reg_covar=1e-5, random_state=0), grid, cv=3, refit=False).fit(some)
    best = GaussianMixture(reg_covar=1e-5, random_state=0, **search.best_params_).fit(rows)
    log_p = best.score_samples((test - mean) / deviation) - np.log(deviation).sum()
    return log_p, dict(components=search.best_params_["n_components"])


def kernels(key, train, test, *, judges=1000):
    """A Gaussian kernel on each row; the bandwidth has the best leave-one-out likelihood of some training rows."""
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    rows, (n, dim) = (train - mean) / deviation, train.shape
    own = _squares(rows[:judges], rows)
    own[np.arange(len(own)), np.arange(len(own))] = np.inf

    def log_density(squares, count, width):
        return logsumexp(-squares / (2 * width**2), axis=1) - np.log(count) - dim * np.log(width * np.sqrt(2 * np.pi))

    widths = np.geomspace(0.02, 1.5, 20)
    best = max(widths, key=lambda width: np.mean(log_density(own, n - 1, width)))
    parts = np.array_split((test - mean) / deviation, -(-len(test) // judges))
    log_p = np.concatenate([log_density(_squares(part, rows), n, best) for part in parts])
    return log_p - np.log(deviation).sum(), dict(bandwidth=float(best))


def _squares(a, b):
    return np.maximum((a**2).sum(axis=1)[:, None] - 2 * a @ b.T + (b**2).sum(axis=1), 0.0)


def spline(key, dim):
    return masked_autoregressive_flow(
        key,
        base_dist=Normal(jnp.zeros(dim)),
        transformer=RationalQuadraticSpline(knots=8, interval=5),
        flow_layers=8,
        nn_width=64,
    )


def coupling(key, dim):
    return coupling_flow(
        key,
        base_dist=Normal(jnp.zeros(dim)),
        transformer=RationalQuadraticSpline(knots=8, interval=5),
        flow_layers=8,
        nn_width=64,
    )


def bnaf(key, dim):
    return block_neural_autoregressive_flow(key, base_dist=Normal(jnp.zeros(dim)), nn_block_dim=8)


def peer(make, learning_rate=1e-3):
    """FlowJAX's own training on standardized rows, with early stopping on a tenth of them.

    Small tables have smaller batches and more epochs: the spline MAF was better by 1 to 3 nats with them on held-out
    rows of `energy` and `concrete`.
    """

    def run(key, train, test):
        mean, deviation = train.mean(axis=0), train.std(axis=0)
        flow_key, fit_key = jr.split(key)
        is_small = len(train) < 5000
        fitted, losses = fit_to_data(
            fit_key,
            make(flow_key, train.shape[1]),
            jnp.asarray((train - mean) / deviation),
            learning_rate=learning_rate,
            max_epochs=300 if is_small else 60,
            max_patience=10 if is_small else 5,
            batch_size=64 if is_small else 256,
            show_progress=False,
        )
        log_p = jax.jit(jax.vmap(fitted.log_prob))(jnp.asarray((test - mean) / deviation))
        return np.asarray(log_p) - np.log(deviation).sum(), dict(looks=len(losses["val"]))

    return run


UCI = ("wine_white", "energy", "concrete", "protein")
TABLES = dict(power=power, miniboone=miniboone, patches=patches) | {name: uci(name) for name in UCI}
METHODS = {
    "ours": ours,
    "FlowJAX spline MAF": peer(spline),
    "FlowJAX spline coupling": peer(coupling),
    "FlowJAX BNAF": peer(bnaf, learning_rate=5e-3),
    "Gaussian mixture": mixture,
    "kernels": kernels,
    "Gaussian": gaussian,
}


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("DDNF_DATA") or ROOT.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "density.json")
    parser.add_argument("--tables", nargs="+", default=TABLES)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--limit", type=float, default=900.0, help="process seconds of a fit")
    options = parser.parse_args()
    record_file.check_record(options.out)
    if not (Path(options.data) / "miniboone_maf_val_test.npz").exists():
        parser.error(f"Expected the tables in {str(options.data)!r}; set --data or DDNF_DATA.")
    for table, seed in itertools.product(options.tables, options.seeds):
        train, test = TABLES[table](options.data, seed)
        for method in options.methods:
            if not any(_place(row) == (table, method, seed) and not row.get("older") for row in _rows(options.out)):
                row = dict(
                    table=table, method=method, seed=seed, **measure(METHODS[method], seed, train, test, options.limit)
                )
                print(row, flush=True)
                _save(options.out, row)


def measure(method, seed, train, test, limit):
    """The figures of one fit, which compiles all that it needs."""
    jax.clear_caches()
    start, used = time.perf_counter(), time.process_time()
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        log_p, more = method(jr.key(seed), train, test)
    except TimeoutError:
        return dict(test=None, stopped_after=limit)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    times = dict(seconds=time.perf_counter() - start, process_seconds=time.process_time() - used)
    more = {name: value() if callable(value) else value for name, value in more.items()}
    return dict(test=float(log_p.mean()), error=float(log_p.std() / np.sqrt(len(log_p))), **more, **times)


def _stop(*_):
    raise TimeoutError


def _place(row):
    return row["table"], row["method"], row["seed"]


def _rows(path):
    return json.loads(path.read_text())["rows"] if path.exists() else []


def _save(path, row):
    """Adds a row to the file as it is now: another run may have added rows since. It replaces that of older code."""
    others = [other for other in _rows(path) if _place(other) != _place(row)]
    rows = sorted([*others, plain(row)], key=_place)
    record = dict(command="python benchmarks/density.py", versions=dict(jax=jax.__version__), rows=rows)
    record_file.write(path, record, indented=True)


if __name__ == "__main__":
    main()
