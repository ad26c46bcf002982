"""What an experiment is: settings, parts to be run one by one, and all that is shown, drawn from their JSON alone."""

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tqdm.auto import tqdm

from ddnf.training.checkpoint import remove_checkpoints
from ddnf_paper.record import check_record, circumstances, plain, read, write

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
        parts: from settings and seed, the units of work by name; each gives a dict of JSON values and arrays, and is
            saved by `plain` when it is done. Those of an experiment with checkpoints are given a folder for them.
        tables, pictures, claims: from the record of a run, which is all that they may look at.
    """

    name: str
    title: str
    about: str
    profiles: Mapping[Profile, Any]
    parts: Callable[[Any, int], Mapping[str, Callable[..., dict[str, Any]]]]
    tables: Callable[[Record], list[Table]]
    pictures: Callable[[Record], list[Picture]]
    claims: Callable[[Record], list[Claim]]
    has_checkpoints: bool = False


def run(
    experiment: Experiment,
    out: Path,
    *,
    profile: Profile,
    seed: int = 0,
    resume: bool = True,
    again: bool = False,
    wanted: Callable[[str], bool] = lambda name: True,
    changes: Mapping[str, Any] | None = None,
) -> Record:
    """Runs the parts of an experiment that are wanted and not in its file yet, each saved when it is done.

    Without `resume` whatever is in the file is replaced; with it, results of other settings are an error, and `again`
    takes the parts that are wanted out of the file first. `changes` are settings other than the profile's. Processes
    with different parts of one experiment may write to one folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(experiment.profiles[profile], **(changes or {}))
    record = _begin(experiment.name, profile, config, seed)
    path = out / f"{experiment.name}.json"
    check_record(path)
    folder = out / f"{experiment.name}-checkpoints"
    if resume:
        record = _taken_over(record, path)
        if again and path.exists():
            record = _without(record, wanted)
            write(path, record)
    else:
        path.unlink(missing_ok=True)
        for checkpoint in folder.glob("*"):
            remove_checkpoints(checkpoint)
    parts = {name: part for name, part in experiment.parts(config, seed).items() if wanted(name)}
    if not parts:
        raise ValueError(f"Expected at least one part of {experiment.name} to run; got a choice of none.")
    left = [name for name in parts if name not in record["parts"]]
    for name in (bar := tqdm(left, desc=experiment.name, initial=len(parts) - len(left), total=len(parts))):
        bar.set_postfix_str(name)
        start = time.perf_counter()
        checkpoint = folder / re.sub(r"[^a-z0-9+]+", "-", name)
        found = plain(parts[name](checkpoint) if experiment.has_checkpoints else parts[name]())
        record = _taken_over(record, path)
        record["parts"][name] = found
        record["seconds"][name] = time.perf_counter() - start
        write(path, record)
        remove_checkpoints(checkpoint)
    return record


def _taken_over(record: Record, path: Path) -> Record:
    """The record with all parts that its file has by now."""
    if not path.exists():
        return record
    found = read(path)
    _check_same(found, record, path)
    return record | {name: record[name] | found.get(name, {}) for name in ("parts", "seconds")}


def _without(record: Record, unwanted: Callable[[str], bool]) -> Record:
    kept = [name for name in record["parts"] if not unwanted(name)]
    return record | {entry: {name: record[entry][name] for name in kept} for entry in ("parts", "seconds")}


def resolution(figure: "Figure") -> float:
    """Dots in an inch: wide figures are to take no more room than others."""
    return min(110.0, 1800 / figure.get_figwidth())


def _check_same(found: Record, record: Record, path: Path) -> None:
    """Parts made with other settings are not ours, and not ours to delete."""
    if any(found.get(name, record[name]) != record[name] for name in ("config", "seed")):
        raise ValueError(
            f"Expected an --out without results, or with those of the same settings and seed; got {str(path)!r} of "
            f"{found.get('command')!r}. Give another folder, or --no-resume to replace them."
        )


def _begin(name: str, profile: Profile, config: Any, seed: int) -> Record:
    return dict(
        name=name,
        command=f"ddnf reproduce {name} --profile {profile} --seed {seed}",
        profile=profile,
        config=json.loads(json.dumps(dataclasses.asdict(config))),
        seed=seed,
        **circumstances(),
        parts={},
        seconds={},
    )
