"""Trees of files that are none of our business: whatever runs, each must stay as it is."""

import os
import random
from pathlib import Path

# Names that our own code uses or might take for its own, among others.
NAMES = (
    *("thesis", "photos", "2022", "1", "0", "state", "state.old", "run.txt", "round-0", "1.orbax-checkpoint-tmp-3"),
    *("model.ddnf", "model.html", "model.tmp", "draws.csv", "draws.tmp", "scores.npy", ".hidden", "a b.txt"),
    *("figures", "report", "index.html", "index.tmp", ".trial", "toy.json", "toy.tmp", "toy-checkpoints", "tmp"),
    *("compare-energy1.json", "compare-energy1.tmp", "compare-energy1-K1.png", "Zoë", "x" * 60),
)


def plant(folder: Path, seed: int, count: int = 12) -> dict[Path, bytes]:
    """Random files in random folders below `folder`, none in place of another; their contents by path."""
    rng, files = random.Random(seed), {}
    for _ in range(count):
        path = folder.joinpath(*rng.choices(NAMES, k=rng.randint(1, 3)))
        if path.exists() or any(parent.is_file() for parent in path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.choice([b"", b"{}", b"mine", rng.randbytes(50)]))
        path.chmod(rng.choice([0o644, 0o600, 0o444]))
        files[path] = path.read_bytes()
    return files


def snapshot(folder: Path) -> dict[str, tuple]:
    """Every file, folder and link below a folder, with content, permissions and time."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(root, name)
            is_file = path.is_file() and not path.is_symlink()
            seen = (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns) if is_file else ()
            found[str(path.relative_to(folder))] = seen
    return found
