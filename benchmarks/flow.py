"""Speed of the flow's training step, as ratios within one run on one core.

    python benchmarks/flow.py [--seconds 10]

A training step is the value and the gradient of mean(|y|^2 / 2 - log det) over a batch, in float32. The
sides of one comparison alternate, so that noise of the machine affects them alike; times are medians. Compilation is
timed separately.
"""

import argparse
import platform
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import one_core

one_core.keep()

import jax
import jax.numpy as jnp
from tqdm import tqdm

import ddnf
from benchmarks.steps import milliseconds, plain_step, training_step
from ddnf import LogDet
from ddnf_paper import record as record_file
from ddnf_paper.text import markdown_table


class AutodiffJacobian(LogDet):
    """The Jacobian of the step by autodiff, its determinant by LU, within our scan."""

    def apply(self, step, z, *, cell):
        return step.apply(z), jnp.linalg.slogdet(jax.jacfwd(step.apply)(z))[1]


class Nothing(LogDet):
    """No log-determinant at all: the cost of the map alone."""

    @property
    def takes_lanes(self):
        return True

    def apply(self, step, z, *, cell):
        return step.apply(z), jnp.zeros(z.shape[1:], z.dtype)


HEADER = ("comparison", "dim", "hidden", "batch", "first", "second", "ratio", "bound")
EXACT, ONE_PROBE = ddnf.Exact(), ddnf.Taylor(2, probes=1)
# name, size of the flow, batch, the two rules (None: the plain step), and the bound on time(first) / time(second)
COMPARISONS = (
    ("exact / plain autodiff and LU", dict(dim=40, hidden=(2, 2)), 100, EXACT, None, 1 / 200),
    ("exact / autodiff and LU, recomputed", dict(dim=40, hidden=(2, 2)), 100, EXACT, AutodiffJacobian(), 1 / 200),
    ("exact / one-probe Taylor(2)", dict(dim=40, hidden=(2, 2)), 100, EXACT, ONE_PROBE, 1.0),
    ("exact / no log-det", dict(dim=40, hidden=(2, 2)), 100, EXACT, Nothing(), 2.0),
    ("exact / no log-det", dict(dim=2, hidden=(2, 2)), 256, EXACT, Nothing(), 2.0),
    ("exact / no log-det", dict(dim=2, hidden=(16, 16)), 256, EXACT, Nothing(), 2.0),
    ("exact / no log-det", dict(dim=40, hidden=(16,)), 256, EXACT, Nothing(), 2.0),
    ("exact / one-probe Taylor(2)", dict(dim=40, hidden=(64, 8, 64)), 100, EXACT, ONE_PROBE, 3.0),
)


def compare(name, size, batch, first, second, bound, *, seconds):
    steps = [training_step(rule, size, batch) if rule else plain_step(size, batch) for rule in (first, second)]
    ours, theirs = milliseconds([step.run for step in steps], seconds=seconds)
    return dict(
        comparison=name,
        **size,
        batch=batch,
        first_ms=ours,
        second_ms=theirs,
        ratio=ours / theirs,
        bound=bound,
        first_compile_s=steps[0].compile_seconds,
        second_compile_s=steps[1].compile_seconds,
    )


def compile_growth(*, repetitions):
    """Compile time of K = T = 32 against K = T = 2."""
    size, times = dict(dim=2, hidden=(16, 16)), {2: [], 32: []}
    for _ in range(repetitions):
        for n, record in times.items():
            jax.clear_caches()
            record.append(training_step(EXACT, size, 256, blocks=n, steps=n).compile_seconds)
    small, large = (statistics.median(times[n]) for n in (2, 32))
    return dict(comparison="compile K=T=32 / K=T=2", first_s=large, second_s=small, ratio=large / small, bound=1.3)


def cells(row):
    """A row of the table."""
    unit = "ms" if "first_ms" in row else "s"
    times = (f"{row[f'{which}_{unit}']:.2f} {unit}" for which in ("first", "second"))
    setting = (row.get(name, "") for name in ("dim", "hidden", "batch"))
    return row["comparison"], *setting, *times, f"{row['ratio']:.4g}", f"{row['bound']:.4g}"


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each comparison, compilation apart")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("flow.json"))
    arguments = parser.parse_args()
    record_file.check_record(arguments.out)
    rows: list[dict] = [compare(*row, seconds=arguments.seconds) for row in tqdm(COMPARISONS, desc="benchmarks")]
    rows.append(compile_growth(repetitions=max(1, round(arguments.seconds / 2))))
    print(markdown_table(HEADER, map(cells, rows)))
    result = dict(
        command=f"python benchmarks/flow.py --seconds {arguments.seconds:g}",
        jax=jax.__version__,
        python=platform.python_version(),
        machine=platform.machine(),
        rows=rows,
    )
    record_file.write(arguments.out, result, indented=True)
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
