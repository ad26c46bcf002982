"""Fits of many data sets of one shape in one process: processor seconds and compiled programs of the first and later.

python -m benchmarks.fits
"""

import json
import time
from pathlib import Path

import jax
import jax.random as jr
import numpy as np

import ddnf

RESULTS = Path(__file__).parents[1] / "results" / "fits.json"


def main() -> None:
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: compiled.append(event) if "backend_compile" in event else None
    )
    rng, found = np.random.default_rng(0), []
    for rows in (2000, 6000):
        for number in range(3):
            compiled.clear()
            began = time.process_time()
            x = rng.normal(size=(rows, 3))
            ddnf.fit_density(jr.key(number), x, components=4, steps=200, progress=False)
            seconds = time.process_time() - began
            found.append(dict(rows=rows, fit=number, processor_seconds=seconds, compiled=len(compiled)))
            print(found[-1], flush=True)
    RESULTS.write_text(json.dumps(dict(command="python -m benchmarks.fits", fits=found), indent=2) + "\n")


if __name__ == "__main__":
    main()
