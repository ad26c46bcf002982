"""The `ddnf compare` command: models side by side on a target or on data; numbers as text, and a picture."""

import dataclasses
import runpy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.random as jr
import numpy as np
from tqdm.auto import tqdm

from ddnf import Target
from ddnf.density import READERS, open_table
from ddnf.system import require
from ddnf_paper.compare import run_on_data, run_on_target
from ddnf_paper.models import FLOWS, MODELS, Settings, min_dim, split_by_layers
from ddnf_paper.plane import Plane, of_cancer, of_energy
from ddnf_paper.record import check_record, environment, plain, read, write
from ddnf_paper.targets import cancer
from ddnf_paper.targets.toy import ENERGIES
from ddnf_paper.text import format_rows

COLUMNS = dict(
    title=("model", ""),
    layers=("K", "d"),
    parameters=("parameters", ",d"),
    kl=("KL(q|p)", ".4f"),
    mass=("mass of q", ".4f"),
    elbo=("ELBO", ".4f"),
    khat=("k-hat", ".2f"),
    ess=("ESS", ".3f"),
    r_hat=("R-hat", ".3f"),
    log_likelihood=("log-likelihood", ".4f"),
    log_likelihood_error=("+-", ".4f"),
    fit_seconds=("fit, s", ".1f"),
    step_ms=("step, ms", ".2f"),
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A target or data that models are compared on.

    Attributes:
        name: used in file names.
        models: names of the models that can be fitted to it.
        run: fits one, from key, name, layers and settings, and returns a dict of JSON values.
        settings: default settings.
        image: density of a target in the plane on a grid.
        points: some rows of the data.
        extent: left, right, bottom and top of the images.
    """

    name: str
    models: Sequence[str]
    run: Callable[..., dict[str, Any]]
    settings: Settings
    image: np.ndarray | None = None
    points: np.ndarray | None = None
    extent: Sequence[float] | None = None


def compare(
    subject: Subject,
    models: Sequence[str],
    layers: Sequence[int],
    *,
    out: Path,
    settings: Settings,
    seed: int = 0,
    resume: bool = True,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Fits models with each number of layers, saves each result when it is done, and draws the densities."""
    wanted = _wanted(subject, models, layers)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"compare-{subject.name}.json"
    check_record(path)
    for count in layers:
        require("ddnf.viz.plot", "paper").check_picture(_picture(out, subject, count))
    record = _record(subject, settings, seed, path if resume else None)
    rows: dict[tuple[str, int | None], dict[str, Any]] = {(row["model"], row["layers"]): row for row in record["rows"]}
    remaining = [pair for pair in wanted if pair not in rows]
    for name, count in (bar := tqdm(remaining, desc="compare", disable=not progress)):
        bar.set_postfix_str(f"{MODELS[name]}, K={count}" if count else MODELS[name])
        found = subject.run(jr.key(seed), name=name, layers=count or 1, settings=settings)
        rows[name, count] = plain(dict(model=name, title=MODELS[name], layers=count, **found))
        write(path, record | dict(command=_command(subject, rows, settings, seed), rows=list(rows.values())))
    chosen = [rows[pair] for pair in wanted]
    _show(chosen)
    pictures = _draw(subject, chosen, layers, out)
    print(f"numbers: {path}" + "".join(f"\npicture: {picture}" for picture in pictures))
    return chosen


def subject_of(text: str, *, dim: int | None = None, seed: int = 0) -> Subject:
    """The subject that ``--target`` names: a toy energy, a cancer posterior, a data file, or a density in a file."""
    if text in ENERGIES:
        energy = ENERGIES[text]
        return _target_subject(text, Target(energy.log_density, 2), Settings(), of_energy(energy))
    whitened = Settings(end="full", temper=0.0)
    if text in cancer.REFERENCE:
        return _target_subject(text, Target(getattr(cancer, text), 2), whitened, of_cancer(text))
    if Path(text).suffix in READERS:
        return _data_subject(Path(text), seed)
    if ".py:" in text:
        path, _, name = text.rpartition(":")
        return _target_subject(Path(path).stem + "-" + name, _user_target(Path(path), name, dim), whitened)
    known = ", ".join([*ENERGIES, *cancer.REFERENCE])
    raise ValueError(f"Expected a target ({known}), a data file ({', '.join(READERS)}) or file.py:name; got {text!r}.")


def _target_subject(name: str, target: Target, settings: Settings, plane: Plane | None = None) -> Subject:
    def run(key, **options):
        return run_on_target(key, target, plane=plane, progress=False, **options)

    models = [name for name in MODELS if min_dim(name) <= target.dim]
    if plane is None:
        return Subject(name, models, run, settings)
    return Subject(name, models, run, settings, plane.image(plane.log_density), extent=plane.shown)


def _data_subject(path: Path, seed: int) -> Subject:
    """A fifth of the rows is held out for the comparison."""
    file = open_table(path)
    rows = file.read(list(range(file.width)))
    rows = rows[np.random.default_rng(seed).permutation(len(rows))]
    held = -(-len(rows) // 5)

    def run(key, **options):
        return run_on_data(key, rows[held:], rows[:held], progress=False, **options)

    models = [name for name in FLOWS if min_dim(name) <= rows.shape[1]]
    return Subject(path.stem, models, run, Settings(), points=rows[held:][:1000])


def _user_target(path: Path, name: str, dim: int | None) -> Target:
    if not path.is_file():
        raise ValueError(f"Expected a Python file; got {str(path)!r}.")
    found = runpy.run_path(str(path)).get(name)
    if isinstance(found, Target):
        return found
    if not callable(found) or dim is None:
        raise ValueError(
            f"Expected {name!r} in {str(path)!r} to be a ddnf.Target, or a log density together with --dim; "
            f"got {type(found).__name__} and dim {dim}."
        )
    return Target(found, dim)


def _wanted(subject: Subject, models: Sequence[str], layers: Sequence[int]) -> list[tuple[str, int | None]]:
    names = [*subject.models] if "all" in models else [*dict.fromkeys(models)]
    for name in names:
        if name not in subject.models:
            raise ValueError(f"Expected models among all, {', '.join(subject.models)}; got {name!r}.")
    if not layers or min(layers) < 1:
        raise ValueError(f"Expected layers of at least 1; got {' '.join(map(str, layers))}.")
    layered, single = split_by_layers(names)
    wanted: list[tuple[str, int | None]] = [(name, count) for count in layers for name in layered]
    return wanted + [(name, None) for name in single]


def _record(subject: Subject, settings: Settings, seed: int, path: Path | None) -> dict[str, Any]:
    """The record of a comparison, with the rows of earlier runs with the same settings."""
    record: dict[str, Any] = dict(
        settings=dataclasses.asdict(settings),
        seed=seed,
        **environment(),
        rows=[],
    )
    if path is not None and path.exists():
        found = read(path)
        if (found["settings"], found["seed"]) == (record["settings"], seed):
            record["rows"] = found["rows"]
    return record


def _command(subject: Subject, rows: dict[tuple[str, int | None], dict], settings: Settings, seed: int) -> str:
    """The command that makes these rows."""
    models = " ".join(dict.fromkeys(name for name, _ in rows))
    layers = " ".join(str(count) for count in dict.fromkeys(count for _, count in rows) if count)
    given = {
        "layers": layers,
        "steps": settings.steps,
        "batch": settings.batch,
        "starts": settings.starts,
        "seed": seed,
    }
    options = " ".join(f"--{name} {value}" for name, value in given.items() if value != "")
    return f"ddnf compare --target {subject.name} --models {models} {options}"


def _show(rows: list[dict[str, Any]]) -> None:
    known = {key: column for key, column in COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    print(format_rows(rows, known))
    for row in rows:
        for issue in row.get("issues", ()):
            layers = f", K={row['layers']}" if row["layers"] else ""
            print(f"{row['title']}{layers}: {issue}")


def _draw(subject: Subject, rows: list[dict[str, Any]], layers: Sequence[int], out: Path) -> list[Path]:
    """A picture for each number of layers: the target, then the density or the draws of each model."""
    plot = require("ddnf.viz.plot", "paper")
    paths = []
    for count in layers:
        panels = {"target": _panel(plot, subject, subject.image, subject.points)}
        for row in (row for row in rows if row["layers"] in (count, None)):
            figure = next((f"{label} {row[key]:.3g}" for key, label in _UNDER.items() if row.get(key) is not None), "")
            panels[f"{row['title']}\n{figure}"] = _panel(plot, subject, row.get("image"), row.get("draws"))
        path = _picture(out, subject, count)
        plot.save(plot.gallery({k: v for k, v in panels.items() if v is not None}), path, dpi=110.0)
        paths.append(path)
    return paths


def _picture(out: Path, subject: Subject, layers: int) -> Path:
    return out / f"compare-{subject.name}-K{layers}.png"


_UNDER = dict(kl="KL", log_likelihood="log-likelihood", ess="ESS", r_hat="R-hat")


def _panel(plot, subject, image, points):
    if image is not None:
        return partial(plot.image, values=np.array(image), extent=subject.extent)
    if points is not None and np.shape(points)[1] > 1:
        return partial(plot.scatter, points=np.array(points)[:, :2], extent=subject.extent)
    return None
