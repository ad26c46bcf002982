"""Runs experiments of the paper and draws their figures from the result files."""

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddnf.system import check_overwrite
from ddnf.viz import plot, view
from ddnf_paper.experiment import Experiment, Profile, resolution, run
from ddnf_paper.record import check_record
from ddnf_paper.registry import EXPERIMENTS


def reproduce(
    names: Sequence[str],
    out: Path,
    *,
    profile: Profile,
    seed: int = 0,
    resume: bool = True,
    again: bool = False,
    wanted: Mapping[str, Callable[[str], bool]] | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, list[Path]]:
    """Runs the named experiments (or "all") and draws their figures from the JSON alone.

    Args:
        names: of the experiments.
        out: folder for NAME.json, for figures/NAME-FIGURE.png, and for the report.
        profile: "smoke", "quick" or "full".
        seed: random seed.
        resume: whether to keep the parts in the folder that were made with the same settings and seed.
        again: whether to run the wanted parts again, and keep the others.
        wanted: for an experiment, which of its parts to run, by name; all by default.
        changes: for an experiment, settings that differ from the profile's.

    Returns:
        For each experiment, the figures drawn.
    """
    chosen = choose(names)
    _check(out, chosen)
    drawn = {}
    for name, experiment in chosen.items():
        some = {} if wanted is None or name not in wanted else dict(wanted=wanted[name])
        other = (changes or {}).get(name)
        run(experiment, out, profile=profile, seed=seed, resume=resume, again=again, changes=other, **some)
        drawn[name] = draw(experiment, out)
    return drawn


def choose(names: Sequence[str]) -> dict[str, Experiment]:
    """The experiments of these names, in the order of the report; all of them for "all" or no name.

    Example:
        >>> list(choose(["regularization", "accuracy"]))
        ['accuracy', 'regularization']
    """
    for name in names:
        if name not in (*EXPERIMENTS, "all"):
            raise ValueError(f"Expected experiments of {', '.join(EXPERIMENTS)}, or all; got {name!r}.")
    everything = not names or "all" in names
    return {name: experiment for name, experiment in EXPERIMENTS.items() if everything or name in names}


def draw(experiment: Experiment, out: Path) -> list[Path]:
    """Draws an experiment's figures from its JSON in the folder."""
    record = json.loads((out / f"{experiment.name}.json").read_text())
    folder = out / "figures"
    folder.mkdir(exist_ok=True)
    paths = []
    for picture in experiment.pictures(record):
        paths.append(folder / f"{experiment.name}-{picture.name}.png")
        plot.save(picture.figure, paths[-1], dpi=resolution(picture.figure))
    return paths


def report(out: Path) -> Path | None:
    """Writes the report page on what is in the folder; None where there is no such page."""
    if find_spec("ddnf_paper.report") is None:
        return None
    return import_module("ddnf_paper.report").write(out)


def _check(out: Path, names: Iterable[str]) -> None:
    """Checks before any work is done that its results can be written, and that no file of the user's is in the way."""
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out / "figures"):
            pass
    except OSError as error:
        raise ValueError(f"Expected a folder that may be written; got {str(out)!r} ({error.strerror}).") from error
    for name in names:
        check_record(out / f"{name}.json")
    check_overwrite(out / "report" / "index.html", kind="a report of ddnf", is_ours=view.is_page)
