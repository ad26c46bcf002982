"""The cost of a fit of each flow on the first toy energy: seconds to compile, and the time of a training step.

python benchmarks/baselines.py [--out results/baseline-times.json] [--models planar naf ...] [--layers 2 8 10]

The models, settings and steps are those of `ddnf reproduce toy --profile full`, one core, float32. All models are
measured in turns, several times, so that a slower phase of the machine affects all of them; the table shows medians.
Each measurement is saved and not repeated. The steps are the first ones of the training: later an adaptive solver (CNF,
FFJORD) may need more evaluations per step.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from tqdm import tqdm

from ddnf.flows import for_training
from ddnf.posterior import ReverseKL, best_gradient
from ddnf.training import adam, fit
from ddnf_paper.models import (
    MODELS,
    count_parameters,
    is_fast,
    learning_rate_for,
    make,
    settings_for,
    split_by_layers,
)
from ddnf_paper.record import environment, read, write
from ddnf_paper.targets.toy import ENERGIES
from ddnf_paper.text import format_rows
from ddnf_paper.toy import PROFILES

CONFIG = PROFILES["full"]
CHUNK, CHUNKS, TURNS = 20, 3, 3
COLUMNS = dict(
    title=("model", ""),
    layers=("K", "d"),
    parameters=("parameters", ",d"),
    compile_seconds=("compile, s", ".1f"),
    step_ms=("step, ms", ".2f"),
    steps=("steps", ",d"),
    fit_seconds=("one fit, s", ".0f"),
)


def chunk_seconds(name: str, layers: int) -> np.ndarray:
    """Seconds of chunks of training steps; the first one of a process compiles."""
    settings = settings_for(name, CONFIG.settings)
    flow = for_training(make(name, jr.key(0), 2, layers=layers, settings=settings))
    gradient = best_gradient(flow) if is_fast(name) else "total"
    temper = int(settings.temper * settings.steps)
    loss = ReverseKL(ENERGIES["energy1"].log_density, None, None, settings.batch, gradient, temper, jnp.asarray(1.0))
    optimizer = adam(learning_rate_for(name, settings, layers), settings.steps)
    steps = CHUNK * CHUNKS
    return fit(jr.key(1), flow, loss, steps=steps, chunk=CHUNK, optimizer=optimizer, progress=False).seconds


def measured(row: dict, name: str, layers: int, *, is_first: bool) -> dict:
    """The row with one more measurement."""
    seconds = chunk_seconds(name, layers)
    steps = row.get("samples_ms", []) + [1000 * s / CHUNK for s in (seconds[1:] if is_first else seconds)]
    begun = row.get("first_seconds", float(seconds[0]))
    return dict(
        first_seconds=begun, samples_ms=steps, turns=row.get("turns", 0) + 1, **summary(name, layers, begun, steps)
    )


def summary(name: str, layers: int, begun: float, samples: list[float]) -> dict:
    """The values of the table."""
    settings = settings_for(name, CONFIG.settings)
    step = float(np.median(samples))
    compiling = max(0.0, begun - CHUNK * step / 1000)
    return dict(
        model=name,
        title=MODELS[name],
        layers=layers,
        parameters=count_parameters(make(name, jr.key(0), 2, layers=layers, settings=settings)),
        compile_seconds=compiling,
        step_ms=step,
        steps=settings.steps,
        batch=settings.batch,
        fit_seconds=compiling + settings.steps * step / 1000,
    )


def main():
    names, _ = split_by_layers(CONFIG.models)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "baseline-times.json")
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--layers", nargs="+", type=int, default=list(CONFIG.layers))
    given = parser.parse_args()
    record: dict[str, Any] = dict(command="python benchmarks/baselines.py", **environment(), rows={})
    if given.out.exists():
        record["rows"] = read(given.out)["rows"]
    wanted = {f"{name}, K={layers}": (name, layers) for layers in given.layers for name in given.models}
    compiled = set()
    left = [
        (turn, key) for turn in range(TURNS) for key in wanted if record["rows"].get(key, {}).get("turns", 0) <= turn
    ]
    for _, key in tqdm(left, desc="baselines"):
        row = record["rows"].get(key, {})
        record["rows"][key] = measured(row, *wanted[key], is_first=key not in compiled)
        compiled.add(key)
        write(given.out, record)
    print(format_rows([record["rows"][key] for key in wanted], COLUMNS))


if __name__ == "__main__":
    main()
