"""DDNF and its peers on the same work in one run: numbers, a page and pictures.

    python -m benchmarks [--quick] [--only steps growth ...] [--out benchmarks]

Everything runs on one core. `--only` repeats some of the parts and keeps the others of an earlier run.
"""

from benchmarks import one_core

one_core.keep()

import argparse
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import report
from benchmarks.alone import ALONE
from benchmarks.turns import Workers
from benchmarks.works import WORKS
from ddnf_paper import record as record_file
from ddnf_paper.record import plain

PARTS = (*WORKS, *ALONE)
QUICK_PARTS = ("steps", "growth", "compiling", "machine", "vae", "race")
PACKAGES = (
    *("ddnf", "jax", "equinox", "flowjax", "diffrax", "numpyro", "bijx", "jflows"),
    *("torch", "torchflows", "torchdiffeq", "zuko", "normflows", "pyro-ppl"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three minutes instead of twenty: fewer sizes and peers")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="only these parts")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    path = options.out / "results.json"
    record_file.check_record(path)
    record = json.loads(path.read_text()) if options.only and path.exists() else dict(parts={})
    with Workers() as workers:
        for name in PARTS:
            if name in (options.only or (QUICK_PARTS if options.quick else PARTS)):
                for part in _part(name, workers, quick=options.quick):
                    record["parts"][name] = part
                    record |= _environment()
                    record_file.write(path, plain(record), indented=True)
    record = json.loads(path.read_text())
    for written in (path, *report.write(record, options.out)):
        print(f"written to {written}")
    print(report.verdicts(record))


def _part(name: str, workers: Workers, *, quick: bool) -> Iterator[dict]:
    """Yields the part after each row, so that long parts are saved as they grow."""
    start = time.perf_counter()
    command = f"python -m benchmarks{' --quick' if quick else ''} --only {name}"
    date, rows = datetime.now(UTC).isoformat(timespec="seconds"), []
    for row in WORKS[name](workers, quick=quick) if name in WORKS else ALONE[name](quick=quick):
        rows.append(row)
        yield dict(command=command, date=date, seconds=time.perf_counter() - start, rows=rows)
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


def _environment() -> dict:
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return dict(
        command="make bench",
        python=platform.python_version(),
        machine=platform.machine(),
        cores=os.cpu_count(),
        versions=versions,
    )


if __name__ == "__main__":
    main()
