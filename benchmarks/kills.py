"""Kills one of two processes that train together, at random moments, and starts both again.

    python -m benchmarks.kills --kills 10

Each time the other process has to end by itself, and the run that goes on from the checkpoint has to end with the
losses and parameters of a run that nobody interrupted.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "kills.json"
WORKER = ROOT / "tests" / "training" / "worker.py"


def start(folder: Path, steps: int) -> list[subprocess.Popen]:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    command = [sys.executable, str(WORKER), str(folder)]
    return [
        subprocess.Popen([*command, *map(str, (rank, 2, port, steps))], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        for rank in range(2)
    ]


def finish(running: list[subprocess.Popen]) -> list[str]:
    return [process.communicate(timeout=600)[1].decode() for process in running]


def clear_line(text: str) -> str | None:
    """Our line, or that of JAX's runtime, which can be first when the first process dies."""
    words = (
        "ddnf: Process",
        "did not come within",
        "none answered within",
        "coordinator has ended",
        "another task died",
    )
    return next((line[:200] for line in text.splitlines() if any(word in line for word in words)), None)


def kill_one(rng: random.Random, folder: Path, steps: int, longest: float) -> dict:
    running = start(folder, steps)
    rank, wait = rng.randrange(2), rng.uniform(0.0, 0.9 * longest)
    time.sleep(wait)
    running[rank].kill()
    killed = time.monotonic()
    text = finish(running)[1 - rank]
    return dict(
        rank=rank,
        after_seconds=wait,
        other_ended_within=time.monotonic() - killed,
        other_code=running[1 - rank].returncode,
        line=clear_line(text),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary, "whole")
        whole.mkdir()
        began = time.monotonic()
        finish(start(whole, options.steps))
        longest = time.monotonic() - began
        expected = json.loads((whole / "found.json").read_text())
        kills = []
        while len(kills) < options.kills:
            folder = Path(tempfile.mkdtemp(dir=temporary))
            found = kill_one(rng, folder, options.steps, longest)
            if (folder / "found.json").exists():
                continue  # the run was done before
            kills.append(found)
            finish(start(folder, options.steps))
            kills[-1]["same_as_uninterrupted"] = json.loads((folder / "found.json").read_text()) == expected
            print(json.dumps(kills[-1]), flush=True)
    found = dict(
        command=f"python -m benchmarks.kills --kills {options.kills} --steps {options.steps}",
        uninterrupted_seconds=longest,
        kills=kills,
    )
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
