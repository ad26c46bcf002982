"""`fit_density` with rows on disk beside the same rows in memory: memory, throughput and log-likelihood.

    python -m benchmarks.disk --rows 20000000

Writes Parquet files with rows of 8 columns, fits them in a process of their own with a given number of steps, and fits
a subsample that is in memory with the same settings in another. Both are judged on the same fresh rows.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.random as jr
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import ddnf

RESULTS = Path(__file__).parents[1] / "results" / "disk.json"
COLUMNS, PER_FILE, GROUP = 8, 2_000_000, 250_000


def simulate(seed: int, rows: int) -> np.ndarray:
    """Three clusters, with a curved and a skewed column."""
    rng = np.random.default_rng([7, seed])
    centre = rng.integers(0, 3, rows)[:, None] * np.linspace(-2.0, 2.0, COLUMNS)
    x = centre + rng.normal(size=(rows, COLUMNS))
    x[:, 1] += 0.3 * x[:, 0] ** 2
    x[:, 2] = np.exp(0.5 * x[:, 2])
    return x


def write(folder: Path, rows: int) -> None:
    for number, first in enumerate(range(0, rows, PER_FILE)):
        x = simulate(number, min(PER_FILE, rows - first))
        table = pa.table({f"x{i}": x[:, i] for i in range(COLUMNS)})
        pq.write_table(table, folder / f"{number:04d}.parquet", row_group_size=GROUP)


def work(kind: str, folder: str, rows: int, steps: int, batch: int) -> dict:
    """One fit, in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = Path(folder)
    if kind == "memory":
        files = sorted(x.glob("*.parquet"))
        some = [pq.read_table(file).slice(0, rows // len(files)) for file in files]
        x = {name: np.concatenate([part[name].to_numpy() for part in some]) for name in some[0].column_names}
    began, used = time.perf_counter(), time.process_time()
    density = ddnf.fit_density(jr.key(0), x, steps=steps, batch=batch, patience=steps, progress=False)
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    fresh = simulate(10**6, 100_000)
    scores = np.asarray(density.log_prob({f"x{i}": fresh[:, i] for i in range(COLUMNS)}), float)
    later = density.seconds[1:]  # the first chunk compiles
    chunk = steps / len(density.seconds)
    return dict(
        rows=density.train_rows + density.held_out_rows,
        seconds=wall,
        cpu_seconds=cpu,
        rows_per_second=float(chunk * batch / np.median(later)),
        fastest_rows_per_second=float(chunk * batch / np.min(later)),
        peak_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        before_gb=before / 2**20,
        log_likelihood=float(scores.mean()),
        error=float(scores.std() / np.sqrt(len(scores))),
    )


def in_process(*words: object) -> dict:
    command = [sys.executable, "-m", "benchmarks.disk", "--work", *map(str, words)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--memory-rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--work", nargs=5)
    options = parser.parse_args()
    if options.work:
        kind, folder, *numbers = options.work
        print(json.dumps(work(kind, folder, *map(int, numbers))))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.rows)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        how = options.steps, options.batch
        found: dict[str, Any] = dict(
            command=f"python -m benchmarks.disk --rows {options.rows} --memory-rows {options.memory_rows}"
            f" --steps {options.steps} --batch {options.batch}",
            columns=COLUMNS,
            files_gb=size / 1e9,
            disk=in_process("disk", folder, options.rows, *how),
            memory=in_process("memory", folder, options.memory_rows, *how),
        )
    found["times_slower"] = found["disk"]["cpu_seconds"] / found["memory"]["cpu_seconds"]
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
