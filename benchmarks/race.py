"""A race to KL(q|p) <= 0.01 on a toy energy: the part that JAX and PyTorch share.

A flow trains in chunks of steps. After each the clock stops, and KL is estimated from 32,768 quasi-random draws with
their exact log density: p is normalized, so this is the KL itself, to about 0.0005 at the goal. A flow whose evaluation
takes more than half as long as its training is evaluated after fewer chunks, and after the last.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import norm, qmc

from ddnf_paper.record import plain

GOAL, CHUNK, BATCH = 0.01, 50, 256
# Peak learning rate of Adam, and the number of steps in which a cosine schedule takes it to a hundredth.
Rate = tuple[float, int]


def noise() -> np.ndarray:
    """Standard normal points, evenly spread."""
    uniform = qmc.Sobol(2, rng=0).random_base2(15)
    return norm.ppf(np.clip(uniform, 1e-6, 1 - 1e-6)).astype(np.float32)


def run(train: Callable[[], Any], evaluate: Callable[[], float], *, limit: float, compile_seconds: float) -> dict:
    """Trains until the goal is reached or time is up. Compilation counts, and is reported separately."""
    spent, evaluating, steps, course = 0.0, 0.0, 0, []
    evaluate()  # compiles the evaluation, which does not count
    while compile_seconds + spent < limit:
        start = time.perf_counter()
        train()
        spent += time.perf_counter() - start
        steps += CHUNK
        if 2 * evaluating > compile_seconds + spent and compile_seconds + spent < limit:
            continue
        start = time.perf_counter()
        course.append((spent, evaluate()))
        evaluating += time.perf_counter() - start
        if course[-1][1] <= GOAL:
            break
    kl = course[-1][1] if course else float("nan")
    return dict(
        seconds=compile_seconds + spent,
        compile_seconds=compile_seconds,
        training_seconds=spent,
        steps=steps,
        kl=kl,
        reached=kl <= GOAL,
        limit=limit,
        course=course[:: max(1, len(course) // 40)],
    )


def main(racers: dict[str, Callable[[str, float, int], dict]]) -> None:
    """Runs one flow in this process; the result is the last line of the output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=racers)
    parser.add_argument("energy")
    parser.add_argument("--limit", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = racers[options.peer](options.energy, options.limit, options.seed)
    row = plain(dict(peer=options.peer, energy=options.energy, seed=options.seed, **found))
    print(json.dumps(row, allow_nan=False))
