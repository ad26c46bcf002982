"""The ways to map a batch through a flow, as ratios to `batch_transform_and_log_det` within one run on one core.

    python benchmarks/batching.py [--seconds 10]

Each is the value and the gradient of mean(|y|^2 / 2 - log det) over 256 points, in float32; "per-example" is a gradient
for each point. All of them alternate; times are medians of processor time, which other work on the machine inflates
less than it does wall time.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import one_core

one_core.keep()

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from flowjax.bijections import Scan
from flowjax.distributions import StandardNormal, Transformed

import ddnf
from benchmarks.steps import Step, compiled
from ddnf_paper import record as record_file
from ddnf_paper.text import markdown_table

BATCH = 256
# Dimension, hidden layers, K and T.
SIZES = ((10, (16, 16), 8, 8), (40, (64, 8, 64), 8, 2), (2, (16, 16), 8, 8))
# How many times as long as the batch method each may take.
BOUNDS = {"vmap": 2, "vmap(jit)": 2, "Transformed": 2, "Scan": 2, "per-example": 4}


def programs(dim: int, hidden: tuple[int, ...], blocks: int, steps: int) -> dict[str, Step]:
    """The compiled ways, by name, for one flow. That of `Scan` has a DDNF of one block per element."""

    def make(key, blocks):
        return ddnf.DDNF(key, dim, blocks=blocks, steps=steps, hidden=hidden, output_scale=0.3)

    x = jr.normal(jr.key(1), (BATCH, dim))
    arrays, static = eqx.partition(make(jr.key(0), blocks), eqx.is_inexact_array)
    scan = Scan(eqx.filter_vmap(lambda key: make(key, 1))(jr.split(jr.key(0), blocks)))
    scan_arrays, scan_static = eqx.partition(scan, eqx.is_inexact_array)

    def loss(y, log_det):
        return jnp.sum(y**2, axis=-1) / 2 - log_det

    def one(arrays, x):
        return loss(*eqx.combine(arrays, static).transform_and_log_det(x))

    def batch(arrays):
        return jnp.mean(loss(*eqx.combine(arrays, static).batch_transform_and_log_det(x)))

    def transformed(arrays):
        q = Transformed(StandardNormal((dim,)), eqx.combine(arrays, static))
        y, log_prob = q.sample_and_log_prob(jr.key(2), (BATCH,))
        return jnp.mean(jnp.sum(y**2, axis=-1) / 2 + log_prob)

    def scanned(arrays):
        y, log_det = jax.vmap(eqx.combine(arrays, scan_static).transform_and_log_det)(x)
        return jnp.mean(loss(y, log_det))

    per_point = {"vmap": jax.vmap(one, (None, 0)), "vmap(jit)": jax.vmap(jax.jit(one), (None, 0))}
    values = {name: lambda arrays, f=f: jnp.mean(f(arrays, x)) for name, f in per_point.items()}
    made = {
        name: compiled(jax.value_and_grad(f), arrays)
        for name, f in dict(batch=batch, **values, Transformed=transformed).items()
    }
    made["Scan"] = compiled(jax.value_and_grad(scanned), scan_arrays)
    made["per-example"] = compiled(lambda arrays: jax.vmap(jax.grad(one), (None, 0))(arrays, x), arrays)
    return made


def processor_milliseconds(steps: dict[str, Step], *, seconds: float) -> dict[str, float]:
    """Median processor time of each, called in turn for about `seconds` of it in all."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.process_time() + seconds
    while time.process_time() < end or len(times["batch"]) < 3:
        for name, step in steps.items():
            step.run()  # warms the CPU caches
            start = time.process_time()
            step.run()
            times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring per size")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("batching.json"))
    options = parser.parse_args()
    rows = []
    for size in SIZES:
        found = processor_milliseconds(programs(*size), seconds=options.seconds)
        for name, value in found.items():
            setting = dict(zip(("dim", "hidden", "blocks", "steps"), size, strict=True))
            rows.append(setting | dict(name=name, ms=value, ratio=value / found["batch"], bound=BOUNDS.get(name, 1)))
    command = f"python benchmarks/batching.py --seconds {options.seconds:g}"
    record_file.write(options.out, dict(command=command, jax=jax.__version__, rows=rows), indented=True)
    header = ("dim", "hidden", "blocks", "steps", "name", "ms", "ratio", "bound")
    shown = [
        (*(str(row[name]) for name in header[:5]), f"{row['ms']:.2f}", f"{row['ratio']:.2f}", str(row["bound"]))
        for row in rows
    ]
    print(markdown_table(header, shown))


if __name__ == "__main__":
    main()
