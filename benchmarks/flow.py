"""Speed of the flow's training step, as ratios within one run on one core.

    python benchmarks/flow.py [--quick]

A training step is the value and the gradient of mean(|y|^2 / 2 - log det) over a batch, in float32. The
contestants of one comparison run in turn, so that a noisy machine disturbs them alike; times are medians.
Compilation is timed apart.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from tqdm import tqdm

import ddnf
from ddnf.flow.log_det import LogDet


class AutodiffJacobian(LogDet):
    """The Jacobian of the step by autodiff, its determinant by LU, within our scan."""

    def step(self, solver, velocity, z, *, dt, cell):
        jacobian = jax.jacfwd(lambda z: solver(velocity, z, dt))(z)
        return solver(velocity, z, dt), jnp.linalg.slogdet(jacobian)[1]


class Nothing(LogDet):
    """No log-determinant at all: the cost of the map alone."""

    @property
    def takes_lanes(self):
        return True

    @property
    def sees_eigenvalues_only(self):
        return True

    def step(self, solver, velocity, z, *, dt, cell):
        return solver(velocity, z, dt), jnp.zeros(z.shape[1:], z.dtype)


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


def training_step(rule, size, batch, *, blocks=8, steps=8):
    """A compiled training step with its arguments, and the seconds it took to compile."""
    flow = ddnf.DDNF(jr.key(0), blocks=blocks, steps=steps, log_det=rule, output_scale=0.5, **size)
    x = jr.normal(jr.key(1), (batch, size["dim"]))
    keys = jr.split(jr.key(2), batch)

    def sample(flow, key, x):
        y, log_det = ddnf.with_key(flow, key).transform_and_log_det(x)
        return jnp.sum(y**2) / 2 - log_det

    arrays, static = eqx.partition(flow, eqx.is_inexact_array)

    def loss(arrays):
        flow = eqx.combine(arrays, static)
        return jnp.mean(jax.vmap(lambda k, x: sample(flow, k, x))(keys, x))

    return _compiled(loss, arrays)


def plain_step(size, batch, *, blocks=8, steps=8):
    """What one would write first, without this library: a scan, the Jacobian by autodiff, LU."""
    flow = ddnf.DDNF(jr.key(0), blocks=blocks, steps=steps, output_scale=0.5, **size)
    weights, biases = flow.fields.weights, flow.fields.biases
    x = jr.normal(jr.key(1), (batch, size["dim"]))

    def cell(layers, z):
        h = z
        for weight, bias in layers[:-1]:
            h = jnp.tanh(weight @ h + bias)
        return z + (layers[-1][0] @ h + layers[-1][1]) / steps

    def sample(parameters, x):
        def one_cell(carry, layers):
            z, log_det = carry
            jacobian = jax.jacfwd(lambda z: cell(layers, z))(z)
            return (cell(layers, z), log_det + jnp.linalg.slogdet(jacobian)[1])

        def block(carry, layers):
            return jax.lax.scan(lambda carry, _: (one_cell(carry, layers), None), carry, length=steps)

        (y, log_det), _ = jax.lax.scan(block, (x, 0.0), list(zip(*parameters, strict=True)))
        return jnp.sum(y**2) / 2 - log_det

    def loss(parameters):
        return jnp.mean(jax.vmap(lambda x: sample(parameters, x))(x))

    return _compiled(loss, (weights, biases))


def _compiled(loss, arrays):
    start = time.perf_counter()
    step = jax.jit(jax.value_and_grad(loss)).lower(arrays).compile()
    return lambda: jax.block_until_ready(step(arrays)), time.perf_counter() - start


def milliseconds(contestants, *, seconds):
    """Median time of each of several functions, called in turn for about `seconds` in all."""
    times = [[] for _ in contestants]
    for run in contestants:
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for run, record in zip(contestants, times, strict=True):
            run()  # the caches are now its own, whoever came before
            start = time.perf_counter()
            run()
            record.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(record) for record in times]


def compare(name, size, batch, first, second, bound, *, seconds):
    steps = [training_step(rule, size, batch) if rule else plain_step(size, batch) for rule in (first, second)]
    ours, theirs = milliseconds([run for run, _ in steps], seconds=seconds)
    return dict(
        comparison=name,
        **size,
        batch=batch,
        first_ms=ours,
        second_ms=theirs,
        ratio=ours / theirs,
        bound=bound,
        first_compile_s=steps[0][1],
        second_compile_s=steps[1][1],
    )


def compile_growth(*, repetitions):
    """Compile time of K = T = 32 against K = T = 2."""
    size, times = dict(dim=2, hidden=(16, 16)), {2: [], 32: []}
    for _ in range(repetitions):
        for n, record in times.items():
            jax.clear_caches()
            record.append(training_step(EXACT, size, 256, blocks=n, steps=n)[1])
    small, large = (statistics.median(times[n]) for n in (2, 32))
    return dict(comparison="compile K=T=32 / K=T=2", first_s=large, second_s=small, ratio=large / small, bound=1.3)


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("flow.json"))
    arguments = parser.parse_args()
    seconds = 1 if arguments.quick else 10
    rows: list[dict] = [compare(*row, seconds=seconds) for row in tqdm(COMPARISONS, desc="benchmarks")]
    rows.append(compile_growth(repetitions=1 if arguments.quick else 5))
    print("| comparison | dim | hidden | batch | first | second | ratio | bound |\n|---|---|---|---|---|---|---|---|")
    for row in rows:
        unit = "ms" if "first_ms" in row else "s"
        times = " | ".join(f"{row[f'{which}_{unit}']:.2f} {unit}" for which in ("first", "second"))
        setting = " | ".join(str(row.get(name, "")) for name in ("dim", "hidden", "batch"))
        print(f"| {row['comparison']} | {setting} | {times} | {row['ratio']:.4g} | {row['bound']:.4g} |")
    result = dict(
        command="python benchmarks/flow.py" + (" --quick" if arguments.quick else ""),
        jax=jax.__version__,
        python=platform.python_version(),
        machine=platform.machine(),
        rows=rows,
    )
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
