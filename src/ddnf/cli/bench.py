"""`ddnf bench`: the benchmarks of a source checkout."""

import subprocess
import sys
from pathlib import Path


def bench(*, quick: bool = False, only: tuple[str, ...] = (), folder: Path | None = None) -> None:
    """Compares the speed with other libraries, in a new environment. Takes about 20 minutes.

    Args:
        quick: use fewer sizes and peers, which takes 3 minutes.
        only: run only these parts: steps, densities, growth, compiling, machine, vae, race, posteriors, flow.
        folder: a source checkout; by default the working folder, or the checkout that ddnf is installed from.
    """
    places = [Path.cwd(), Path(__file__).parents[3]] if folder is None else [folder]
    found = [
        place for place in places if all((place / part).exists() for part in ("benchmarks/__main__.py", "src/ddnf"))
    ]
    if not found:
        raise ValueError(
            f"Expected a source checkout with a folder benchmarks; got {str(places[0])!r}. "
            "Run the command in a checkout, or pass one with --folder."
        )
    words = ["make", "-C", str(found[0]), "bench", f"QUICK={'1' if quick else ''}", f"ONLY={' '.join(only)}"]
    if code := subprocess.run(words, check=False).returncode:
        sys.exit(code)
