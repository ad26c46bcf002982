"""What an experiment is: settings, parts to be run one by one, and all that is shown, drawn from their JSON alone."""

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tqdm.auto import tqdm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Profile = Literal["smoke", "quick", "full"]
Record = dict[str, Any]


class Claim(NamedTuple):
    """A claim of the paper, its value there and here, and what became of it."""

    claim: str
    paper: str
    ours: str
    verdict: Literal["reproduced", "partly", "not reproduced"]
    why: str


class Table(NamedTuple):
    """A table for the report: everything in it is text."""

    caption: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Picture(NamedTuple):
    """A figure for the report, with the text for those who can't see it."""

    name: str
    figure: "Figure"
    caption: str
    alt: str


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment of the paper.

    Attributes:
        name: as in ``ddnf reproduce NAME``.
        title: above its section of the report.
        about: a paragraph on what is done and why.
        profiles: the settings (a frozen dataclass) of each profile.
        parts: from settings and seed, the units of work by name; each gives a dict of plain JSON values and is saved
            when it is done.
        tables, pictures, claims: from the record of a run, which is all that they may look at.
    """

    name: str
    title: str
    about: str
    profiles: Mapping[Profile, Any]
    parts: Callable[[Any, int], Mapping[str, Callable[[], dict[str, Any]]]]
    tables: Callable[[Record], list[Table]]
    pictures: Callable[[Record], list[Picture]]
    claims: Callable[[Record], list[Claim]]


def run(experiment: Experiment, out: Path, *, profile: Profile, seed: int = 0, resume: bool = True) -> Record:
    """Runs the parts of an experiment that are not in its file yet, each saved when it is done."""
    config = experiment.profiles[profile]
    record = _begin(experiment.name, profile, config, seed)
    path = out / f"{experiment.name}.json"
    if resume and path.exists():
        found = json.loads(path.read_text())
        # Parts made with other settings are not ours.
        if (found["config"], found["seed"]) == (record["config"], seed):
            record |= dict(parts=found["parts"], seconds=found["seconds"])
    parts = experiment.parts(config, seed)
    left = [name for name in parts if name not in record["parts"]]
    for name in (bar := tqdm(left, desc=experiment.name, initial=len(parts) - len(left), total=len(parts))):
        bar.set_postfix_str(name)
        start = time.perf_counter()
        record["parts"][name] = parts[name]()
        record["seconds"][name] = time.perf_counter() - start
        _write(path, record)
    return record


def _begin(name: str, profile: Profile, config: Any, seed: int) -> Record:
    return dict(
        name=name,
        command=f"ddnf reproduce {name} --profile {profile} --seed {seed}",
        profile=profile,
        config=json.loads(json.dumps(dataclasses.asdict(config))),
        seed=seed,
        versions={package: version(package) for package in ("ddnf", "jax", "flowjax", "numpy")},
        cores=os.cpu_count(),
        revision=_revision(),
        parts={},
        seconds={},
    )


def _revision() -> str | None:
    """The git revision of a checkout; None elsewhere."""
    here = Path(__file__).parent
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return asked.stdout.strip() or None


def _write(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
