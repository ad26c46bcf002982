"""An experiment: settings, parts that run one by one, and tables, figures and claims made from their JSON alone."""

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tqdm.auto import tqdm

from ddnf.training import remove_checkpoints
from ddnf_paper.record import check_record, environment, plain, read, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Profile = Literal["smoke", "quick", "full"]
Record = dict[str, Any]


class Claim(NamedTuple):
    """A claim of the paper, its value there and here, and the verdict with its limits."""

    claim: str
    paper: str
    ours: str
    verdict: Literal["reproduced", "partly", "not reproduced"]
    why: str


class ReportTable(NamedTuple):
    """A table of the report; every cell is text."""

    caption: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Picture(NamedTuple):
    """A figure of the report, with a caption and a text alternative."""

    name: str
    figure: "Figure"
    caption: str
    alt: str


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment of the paper.

    Attributes:
        name: as in ``ddnf reproduce NAME``.
        title: title of its section of the report.
        about: a paragraph on what is done and why.
        profiles: the settings (a frozen dataclass) of each profile.
        parts: from settings and seed, the units of work by name; each returns a dict of JSON values and arrays, which
            is saved when the part is done.
        tables, pictures, claims: made from the record of a run and nothing else.
        has_checkpoints: whether parts take long: they take a folder for checkpoints and the parts done so far, and what
            is done is reported before all of them are.
        is_current: from settings, the parts done so far and the name of one: whether that one still counts.
    """

    name: str
    title: str
    about: str
    profiles: Mapping[Profile, Any]
    parts: Callable[[Any, int], Mapping[str, Callable[..., dict[str, Any]]]]
    tables: Callable[[Record], list[ReportTable]]
    pictures: Callable[[Record], list[Picture]]
    claims: Callable[[Record], list[Claim]]
    has_checkpoints: bool = False
    is_current: Callable[[Any, Mapping[str, Any], str], bool] = lambda config, done, name: True


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
    """Runs the wanted parts of an experiment that are not in its file yet, and saves each when it is finished.

    Without `resume`, the file is replaced. With it, results of other settings raise an error, and `again` reruns the
    wanted parts. `changes` are settings that differ from the profile. Processes that run different parts of one
    experiment may write to the same folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(experiment.profiles[profile], **(changes or {}))
    record = _new_record(experiment.name, profile, config, seed)
    path = out / f"{experiment.name}.json"
    check_record(path)
    folder = out / f"{experiment.name}-checkpoints"
    if resume:
        record = _with_saved_parts(record, path)
        if again and path.exists():
            record = _without(record, wanted)
            write(path, record)
    else:
        path.unlink(missing_ok=True)
        for checkpoint in folder.glob("*"):
            remove_checkpoints(checkpoint)
    parts = {name: part for name, part in experiment.parts(config, seed).items() if wanted(name)}
    if not parts:
        raise ValueError(f"Expected at least one part of {experiment.name} to run; got none.")
    for name in (bar := tqdm(parts, desc=experiment.name)):
        if name in record["parts"] and experiment.is_current(config, record["parts"], name):
            continue
        bar.set_postfix_str(name)
        start = time.perf_counter()
        checkpoint = folder / re.sub(r"[^a-z0-9+]+", "-", name)
        arguments = (checkpoint, record["parts"]) if experiment.has_checkpoints else ()
        found = plain(parts[name](*arguments))
        record = _with_saved_parts(record, path)
        record["parts"][name] = found
        record["seconds"][name] = time.perf_counter() - start
        write(path, record)
        remove_checkpoints(checkpoint)
    return record


def _with_saved_parts(record: Record, path: Path) -> Record:
    """The record with all parts that are in its file by now."""
    if not path.exists():
        return record
    found = read(path)
    _check_same(found, record, path)
    return record | {name: record[name] | found.get(name, {}) for name in ("parts", "seconds")}


def _without(record: Record, unwanted: Callable[[str], bool]) -> Record:
    kept = [name for name in record["parts"] if not unwanted(name)]
    return record | {entry: {name: record[entry][name] for name in kept} for entry in ("parts", "seconds")}


def resolution(figure: "Figure") -> float:
    """Dots per inch, so that wide figures have no more pixels than others."""
    return min(110.0, 1800 / figure.get_figwidth())


def _check_same(found: Record, record: Record, path: Path) -> None:
    """Raises a ValueError for a file with parts of other settings: they are not mixed, and not deleted."""
    if any(found.get(name, record[name]) != record[name] for name in ("config", "seed")):
        raise ValueError(
            f"Expected an --out without results, or with those of the same settings and seed; got {str(path)!r} of "
            f"{found.get('command')!r}. Give another folder, or --no-resume to replace them."
        )


def _new_record(name: str, profile: Profile, config: Any, seed: int) -> Record:
    return dict(
        name=name,
        command=f"ddnf reproduce {name} --profile {profile} --seed {seed}",
        profile=profile,
        config=json.loads(json.dumps(dataclasses.asdict(config))),
        seed=seed,
        **environment(),
        parts={},
        seconds={},
    )
