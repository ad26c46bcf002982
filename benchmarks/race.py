"""A race to KL(q|p) <= 0.01 on a toy energy: what both sides of it share.

A contestant trains in stretches. After each the clock stops, and KL is taken from 32,768 quasi-random draws with their
exact log density: p is normalized, so this is the KL itself, to about 0.0005 at the goal. Whose draws take longer than
half of the training is judged after fewer of the stretches, and after the last.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import norm, qmc

GOAL, STRETCH, BATCH = 0.01, 50, 256
# The rate of Adam falls by a cosine to a hundredth in so many steps, and stays there.
Rate = tuple[float, int]


def noise() -> np.ndarray:
    """Standard normal points, evenly spread."""
    uniform = qmc.Sobol(2, rng=0).random_base2(15)
    return norm.ppf(np.clip(uniform, 1e-6, 1 - 1e-6)).astype(np.float32)


def run(train: Callable[[], Any], judge: Callable[[], float], *, limit: float, compile_seconds: float) -> dict:
    """Trains until the goal is reached or time is up. Compilation counts, and is told apart."""
    spent, judging, steps, course = 0.0, 0.0, 0, []
    judge()  # and compiles what judges, which is no one's time
    while compile_seconds + spent < limit:
        start = time.perf_counter()
        train()
        spent += time.perf_counter() - start
        steps += STRETCH
        if 2 * judging > compile_seconds + spent and compile_seconds + spent < limit:
            continue
        start = time.perf_counter()
        course.append((spent, judge()))
        judging += time.perf_counter() - start
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


def main(contestants: dict[str, Callable[[str, float, int], dict]]) -> None:
    """One contestant in this process; the result is the last line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=contestants)
    parser.add_argument("energy")
    parser.add_argument("--limit", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = contestants[options.peer](options.energy, options.limit, options.seed)
    print(json.dumps(dict(peer=options.peer, energy=options.energy, seed=options.seed, **found)))
