"""Does `fit_posterior` say so when it is wrong? Hard targets and easy ones with known moments, default settings.

python benchmarks/honesty.py [--out results/honesty.json] [--only NAME] [--seeds 3] [--again]

A fit is wrong if a mean of its draws is off by more than 0.1 deviations or a deviation by more than 10 %, plus three
Monte Carlo errors. It is silent if it is wrong and neither an issue nor an error said so. An issue of a fit that is
right is a false alarm. Each row is saved when it is done; rows that are there already are not computed again.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax
import jax.random as jr
import numpy as np
from tests.models.cases import EASY, HARD, Case, Judged, judge

import ddnf

DRAWS = 10_000
KINDS = {"hard": HARD, "easy": EASY}


def judged(case: Case, draws: np.ndarray, ess: float) -> Judged:
    """The errors of draws; infinite where there is no truth."""
    if case.mean is None or case.deviation is None or not np.isfinite(case.deviation).all():
        return Judged(np.inf, np.inf, False)
    return judge(draws, case.mean, case.deviation, ess=ess, tolerance=0.1, kurtosis=case.kurtosis)


def run(case: Case, seed: int) -> dict:
    """One fit with default settings: its errors, what it said, and the verdict."""
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = ddnf.fit_posterior(jr.key(seed), ddnf.Target(case.log_density, case.dim), progress=False)
    except ValueError as error:
        return dict(verdict="refused", said=[str(error)], seconds=round(time.perf_counter() - start, 1))
    draws = np.asarray(posterior.sample(jr.key(seed + 1000), DRAWS), float)
    mean, deviation, is_right = judged(case, draws, DRAWS if posterior.chains is None else posterior.chains.ess)
    is_silent = not posterior.issues
    verdicts = {(True, True): "right", (True, False): "false alarm", (False, True): "SILENT", (False, False): "warned"}
    return dict(
        verdict=verdicts[is_right, is_silent],
        mean_error=_finite(mean),
        deviation_error=_finite(deviation),
        khat=_finite(posterior.khat),
        ess=_finite(posterior.ess),
        stage=posterior.stage,
        gradients=posterior.gradients,
        seconds=round(time.perf_counter() - start, 1),
        said=list(posterior.issues),
    )


def _finite(value):
    return round(value, 4) if np.isfinite(value) else None


def summary(rows: dict[str, dict]) -> dict[str, dict[str, int]]:
    """The number of rows with each verdict, for hard and easy targets."""
    found: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for name, row in rows.items():
        counts = found[name.split("/")[0]]
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "honesty.json")
    parser.add_argument("--only", help="part of a target's name")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="compute rows again that are there")
    arguments = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
    rows = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else {}
    for kind, cases in KINDS.items():
        for name, case in cases.items():
            for seed in range(arguments.seeds):
                label = f"{kind}/{name}/{seed}"
                if (arguments.only or "") not in label or (label in rows and not arguments.again):
                    continue
                rows[label] = run(case, seed)
                print(label, {k: v for k, v in rows[label].items() if k != "said"}, *rows[label]["said"], flush=True)
                command = "python benchmarks/honesty.py " + " ".join(sys.argv[1:])
                record = dict(command=command.strip(), summary=summary(rows), rows=rows)
                arguments.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
            jax.clear_caches()
    print(summary(rows))


if __name__ == "__main__":
    main()
