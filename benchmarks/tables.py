"""Awkward tables and conditional fits: are the draws of `fit_density`, with its defaults, those of the table?

python benchmarks/tables.py [--out results/tables.json] [--only NAME] [--repetitions 20]

Each repetition makes a table and fits it. Of the awkward tables, 200 draws are compared with 200 new rows by the energy
distance (columns in units of their quartiles, by asinh, categories as indicators; 500 permutations), and rows 1,000
deviations away must have finite scores. Of the conditional fits, PIT values of 500 new rows are tested for uniformity
(Kolmogorov-Smirnov); `gap` is their mean log density under the truth less that of the fit. A repetition passes at the 5
% level: 19 of 20 are expected to if all is right. `bound` rows have what the same test says of 200 other rows of the
generator, and of 200 rows drawn with replacement from the table itself, over 60 repetitions. Two moons: a classifier
tells 1,000 draws from 1,000 exact draws at ten observations (C2ST; 0.5 is best). Each row is saved when it is done;
rows that are there already are not computed again, unless they are marked as those of older code.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.random as jr
import numpy as np
import pandas as pd
from scipy.stats import kstest, norm

import ddnf
from benchmarks import two_moons
from ddnf_paper import record as record_file
from ddnf_paper.record import plain

ROOT = Path(__file__).parents[1]
NEW, PERMUTATIONS = 200, 500


def curved(rng, n):
    """Four dependent columns, one of them skewed."""
    a, b, c = rng.normal(size=(3, n))
    return np.stack([a, a**2 + 0.5 * b, np.exp(0.5 * c + 0.3 * a), b + c], axis=1)


def levels(rng, n):
    """A column of 10 levels and three numbers that depend on it."""
    level = rng.choice(10, n, p=np.arange(1, 11) / 55)
    numbers = rng.normal(size=(n, 3)) * (1 + level[:, None] / 5) + np.stack([level, -level, level % 3], axis=1)
    return pd.DataFrame(numbers, columns=["x", "y", "z"]).assign(level=np.array(list("abcdefghij"))[level])


def labels(rng, n):
    """Ten columns of two or three categories, in dependent pairs, and three numbers."""
    codes = rng.integers(2 + np.arange(10) % 2, size=(n, 10))
    codes[:, 5:] = np.where(rng.random((n, 5)) < 0.5, codes[:, :5] % 2, codes[:, 5:])
    numbers = rng.normal(size=(n, 3)) + codes[:, :3]
    frame = pd.DataFrame(numbers, columns=["x", "y", "z"])
    return frame.assign(**{f"c{i}": np.array(list("abc"))[codes[:, i]] for i in range(10)})


def ties(rng, n):
    """Three dependent columns; of the first, 30 % are exactly zero."""
    rows = rng.normal(size=(n, 3)) @ [[1.0, 0.7, 0.0], [0.0, 0.6, 0.3], [0.0, 0.0, 1.0]]
    rows[rng.random(n) < 0.3, 0] = 0.0
    return rows


def cauchy(rng, n):
    """Two independent Cauchy columns, and their sum with noise."""
    rows = rng.standard_cauchy(size=(n, 2))
    return np.column_stack([rows, rows.sum(axis=1) + rng.normal(size=n)])


def constant(rng, n):
    """Two normal columns, and one that is constant but for the first row."""
    rows = np.column_stack([rng.normal(size=(n, 2)), np.full(n, 5.0)])
    rows[0, 2] = 6.0
    return rows


def heteroscedastic(rng, n):
    """Rows, conditions, and the log density of rows given theirs."""
    x = rng.uniform(-2, 2, size=(n, 1))
    mean, deviation = np.sin(2 * x), 0.1 + 0.4 * np.abs(x)
    y = mean + deviation * rng.normal(size=(n, 1))
    return y, x, norm.logpdf(y, mean, deviation)


def bimodal(rng, n):
    """The same, with two modes that move apart."""
    x = rng.uniform(0, 2, size=(n, 1))
    sign = np.where(rng.random((n, 1)) < 0.3, -1.0, 1.0)
    y = sign * (0.5 + x) + 0.2 * rng.normal(size=(n, 1))
    low, high = (norm.logpdf(y, side * (0.5 + x), 0.2) for side in (-1, 1))
    return y, x, np.logaddexp(np.log(0.3) + low, np.log(0.7) + high)


TABLES = {
    "300 rows": (curved, 300),
    "10 levels and 3 numbers": (levels, 1000),
    "10 columns of categories and 3 numbers": (labels, 1000),
    "30 % ties": (ties, 1000),
    "Cauchy tails": (cauchy, 1000),
    "constant but for one row": (constant, 1000),
}
CONDITIONAL = {"heteroscedastic": (heteroscedastic, 2000), "bimodal": (bimodal, 2000)}


def try_table(make, n, seed):
    """One awkward table: p-value of the two-sample test, and whether far rows have finite scores."""
    rng = np.random.default_rng(seed)
    table, new = make(rng, n), make(rng, NEW)
    if make is constant:
        new[0, 2] = 5.0  # the one row is in the table, not among 200 others
    density = ddnf.fit_density(jr.key(seed), table, progress=False)
    draws = density.sample(jr.key(seed + 1), NEW)
    scale = _numbers(table)
    p_value = energy_test(rng, *(_scaled(rows, scale) for rows in (draws, new)))
    far = new[:5].copy()
    names = ["x", "y", "z"] if isinstance(far, pd.DataFrame) else slice(None)
    far[names] = far[names] + 1000 * scale.std(axis=0) if isinstance(far, pd.DataFrame) else far + 1000 * scale.std(0)
    is_finite = bool(np.isfinite(np.asarray(density.log_prob(far))).all())
    return dict(p_value=p_value, far_rows_finite=is_finite, passes=p_value > 0.05 and is_finite)


def try_bounds(make, n, repetitions=60):
    """The share of repetitions in which rows of the generator, and rows of the table, pass the test of draws."""
    found = []
    for seed in range(1000, 1000 + repetitions):
        rng = np.random.default_rng(seed)
        table, new, other = make(rng, n), make(rng, NEW), make(rng, NEW)
        if make is constant:
            new[0, 2] = other[0, 2] = 5.0
        scale, again = _numbers(table), rng.integers(n, size=NEW)
        same = table.iloc[again] if isinstance(table, pd.DataFrame) else table[again]
        found.append([energy_test(rng, _scaled(rows, scale), _scaled(new, scale)) > 0.05 for rows in (other, same)])
    generator, itself = np.mean(found, axis=0)
    return dict(generator=float(generator), table=float(itself), repetitions=repetitions)


def try_conditional(make, n, seed):
    """One conditional fit: p-value of the test of PIT values, and how much likelier rows are under the truth.

    PIT values are uniform for a density that ignores the condition too; the gap is not small then.
    """
    rng = np.random.default_rng(seed)
    x, condition, _ = make(rng, n)
    density = ddnf.fit_density(jr.key(seed), x, condition, progress=False)
    new, given, truth = make(rng, 500)
    values = density.pit(new, jr.key(seed + 1), given)
    p_value = float(kstest(values[:, 0], "uniform").pvalue)
    gap = float(np.mean(truth) - np.mean(density.log_prob(new, given)))
    return dict(p_value=p_value, gap=gap, passes=p_value > 0.05)


def energy_test(rng, a, b):
    """The p-value of the energy distance between two samples, by permutations."""
    both = np.concatenate([a, b])
    distance = np.sqrt(((both[:, None] - both[None]) ** 2).sum(axis=-1))

    def statistic(sign):
        return -sign @ distance @ sign

    sign = np.repeat([1.0 / len(a), -1.0 / len(b)], [len(a), len(b)])
    found = statistic(sign)
    others = [statistic(rng.permutation(sign)) for _ in range(PERMUTATIONS)]
    return float((1 + np.sum(np.array(others) >= found)) / (1 + PERMUTATIONS))


def _numbers(rows):
    return rows[["x", "y", "z"]].to_numpy() if isinstance(rows, pd.DataFrame) else np.asarray(rows)


def _scaled(rows, table):
    """Numbers in units of the table's quartiles, by asinh, so that no far value decides; indicators of categories."""
    low, middle, high = np.quantile(table, [0.25, 0.5, 0.75], axis=0)
    unit = np.where(high > low, (high - low) / 1.35, table.std(axis=0))
    scaled = np.arcsinh((_numbers(rows) - middle) / unit)
    if not isinstance(rows, pd.DataFrame):
        return scaled
    known = {name: list("abcdefghij" if name == "level" else "abc") for name in rows if name not in ("x", "y", "z")}
    marks = [(rows[name].to_numpy()[:, None] == np.array(levels)) for name, levels in known.items()]
    return np.concatenate([scaled, *marks], axis=1)


def rows_to_do(repetitions) -> Iterator[tuple[str, Callable[..., dict], tuple]]:
    """Labels, and the function and arguments of each."""
    for name, case in TABLES.items():
        yield f"bound/{name}", try_bounds, case
    for kind, (cases, run) in dict(table=(TABLES, try_table), conditional=(CONDITIONAL, try_conditional)).items():
        for name, case in cases.items():
            for seed in range(repetitions):
                yield f"{kind}/{name}/{seed}", run, (*case, seed)
    yield "two moons", two_moons.try_two_moons, (10_000, 0)


def summary(rows):
    """How many repetitions of each case pass."""
    found = {}
    for label, row in rows.items():
        if label.startswith("bound/"):
            found[label] = f"generator {row['generator']:.2f}, table {row['table']:.2f}"
            continue
        name = (label.rpartition("/")[0] or label) + (" (older code)" if row.get("older") else "")
        passed, count = found.get(name, (0, 0))
        found[name] = passed + row["passes"], count + 1
    return {name: v if isinstance(v, str) else f"{v[0]} of {v[1]}" for name, v in found.items()}


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "tables.json")
    parser.add_argument("--only", default="", help="part of a row's label")
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    record_file.check_record(options.out)
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else {}
    for label, run, arguments in rows_to_do(options.repetitions):
        if (label in rows and not rows[label].get("older")) or options.only not in label:
            continue
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about ties and far values, which are the point here
            rows[label] = run(*arguments)
        rows[label] = plain(rows[label] | dict(process_seconds=time.process_time() - start))
        print(label, rows[label], flush=True)
        record = dict(command="python benchmarks/tables.py", summary=summary(rows), rows=rows)
        record_file.write(options.out, record, indented=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
