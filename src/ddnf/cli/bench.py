"""`ddnf bench`: the benchmarks of a source checkout."""

import subprocess
import sys
from pathlib import Path


def bench(*, quick: bool = False, only: tuple[str, ...] = (), folder: Path | None = None) -> None:
    """Measures the speed beside that of other libraries, in an environment that is built for it: 20 minutes.

    Args:
        quick: fewer sizes and peers: 3 minutes.
        only: only these parts: steps, densities, growth, compiling, machine, vae, race, posteriors, flow.
        folder: a checkout of the source; by default the working folder, or the one ddnf is installed from.
    """
    places = [Path.cwd(), Path(__file__).parents[3]] if folder is None else [folder]
    found = [
        place for place in places if all((place / part).exists() for part in ("benchmarks/__main__.py", "src/ddnf"))
    ]
    if not found:
        raise ValueError(
            f"Expected a checkout of the source with a folder benchmarks; got {str(places[0])!r}: "
            "run this in one, or name it with --folder."
        )
    words = ["make", "-C", str(found[0]), "bench", f"QUICK={'1' if quick else ''}", f"ONLY={' '.join(only)}"]
    if code := subprocess.run(words, check=False).returncode:
        sys.exit(code)
