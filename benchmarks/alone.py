"""Benchmarks in which every peer has its own process: the race, and the posteriors."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
RACERS = (
    ("race_jax", "ours"),
    ("race_jax", "FlowJAX MAF-RQS"),
    ("race_jax", "FlowJAX BNAF"),
    ("race_jax", "planar"),
    ("race_jax", "Diffrax CNF"),
    ("race_torch", "Zuko NSF"),
    ("race_torch", "Zuko NAF"),
)
QUICK_RACERS = ("ours", "planar")
POSTERIORS = ("eight_schools-eight_schools_noncentered", "kidiq-kidscore_momiq")
METHODS = ("ours", "NUTS", "AutoIAFNormal", "AutoBNAFNormal")
# Of the error of a mean in reference deviations, and of the relative error of a deviation.
TOLERANCE = 0.05


def race(*, quick: bool) -> Iterator[dict]:
    """Seconds until KL <= 0.01 on the two energies, compilation included, within 10 s.

    Three seeds in turn; a peer that does not reach the goal with the first does not run again.
    """
    energies = ("energy1",) if quick else ("energy1", "energy2")
    runs = [(module, peer, energy) for energy in energies for module, peer in RACERS]
    if quick:
        runs = [run for run in runs if run[1] in QUICK_RACERS]
    for seed in range(1 if quick else 3):
        there = []
        for module, peer, energy in tqdm(runs, desc=f"race {seed + 1}", leave=False):
            words = ["-m", f"benchmarks.{module}", peer, energy, "--limit", "10"]
            row = _row([*words, "--seed", str(seed)], dict(peer=peer, energy=energy, seed=seed))
            if seed > 0 or row.get("reached"):
                there.append((module, peer, energy))
            yield row
        runs = there


def posteriors(*, quick: bool) -> Iterator[dict]:
    """Seconds from the model to 10,000 draws, and whether they are within tolerance, by `benchmarks/posteriors.py`."""
    for name in POSTERIORS[: 1 if quick else None]:
        for method in tqdm(METHODS[: 2 if quick else None], desc=f"posteriors, {name}", leave=False):
            found = _row([str(ROOT / "benchmarks" / "posteriors.py"), "--row", method, name], dict(posterior=name))
            # An error that is NaN is null in JSON.
            errors = [found.get(name) for name in ("mean", "deviation")]
            within = all(error is not None and error <= TOLERANCE for error in errors)
            yield dict(peer=method, **found, within=within)


def _row(arguments: list[str], known: dict) -> dict:
    """The JSON in the last line that a process prints, or its error."""
    try:
        return known | json.loads(_run(arguments).splitlines()[-1])
    except subprocess.CalledProcessError as error:
        return known | dict(error=(error.stderr.strip().splitlines() or ["no message"])[-1][:300])


def _run(arguments: list[str]) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


ALONE: dict[str, Callable[..., Iterator[dict]]] = dict(race=race, posteriors=posteriors)
