"""Nothing of the user's is lost: whatever runs, files that are not ours stay as they are."""

import contextlib
import random
from pathlib import Path

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from benchmarks import report as bench_report
from matplotlib.figure import Figure

import ddnf
from ddnf import cli
from ddnf.density.tables import write_table
from ddnf.storage.file import write as write_model
from ddnf.training import loop
from ddnf.training.checkpoint import remove_checkpoints
from ddnf.viz import plot
from ddnf_paper import record, registry, reproduce, side_by_side
from ddnf_paper.compare import Settings
from ddnf_paper.report import write as write_report
from tests.bystanders import NAMES, plant, snapshot
from tests.cli.test_cli import density
from tests.paper.test_reproduce import good, make

ENDINGS = (".csv", ".tsv", ".npy", ".ddnf", ".html", ".json", ".png", "")
EXPERIMENT = make(dict(first=good), name="toy")


def posterior():
    flow = ddnf.DDNF(jr.key(0), 2, blocks=1, steps=1, hidden=(2,))
    return ddnf.Posterior(flow, None, 0.0, 0.0, 0.0, 0.0, 0.0, (), np.zeros(1), np.zeros(1))


def train(folder):
    loop.fit(jr.key(0), jnp.zeros(2), _loss, steps=4, optimizer=_SGD, checkpoint=folder, progress=False)


def _loss(x, draw):
    return jnp.sum(x**2)


_SGD = loop.adam(0.1, 4)


def figure():
    drawn = Figure(figsize=(1, 1))
    drawn.subplots()
    return drawn


COMPARE = ["compare", "--target", "energy1", "--layers", "1"]
REPRODUCE = ["reproduce", "toy", "--profile", "smoke"]
# Every command and function that takes a path to write to; `path` is a file, a folder or a new name.
ACTIONS = {
    "fit": lambda path: cli.main(["fit", "data.npy", "-o", path, "--quiet"]),
    "fit, checkpoint": lambda path: cli.main(["fit", "data.npy", "-o", "new.ddnf", "--quiet", "--checkpoint", path]),
    "sample": lambda path: cli.main(["sample", "fitted.ddnf", "-n", "2", "-o", path]),
    "score": lambda path: cli.main(["score", "fitted.ddnf", "data.npy", "-o", path]),
    "view": lambda path: cli.main(["view", "fitted.ddnf", "--no-open", "-o", path]),
    "view beside": lambda path: cli.main(["view", "fitted.ddnf", "--no-open"]),
    "compare": lambda path: cli.main([*COMPARE, "-o", path]),
    "compare anew": lambda path: cli.main([*COMPARE, "-o", path, "--no-resume"]),
    "reproduce": lambda path: cli.main([*REPRODUCE, "--out", path]),
    "reproduce anew": lambda path: cli.main([*REPRODUCE, "--out", path, "--no-resume"]),
    "reproduce again": lambda path: cli.main([*REPRODUCE, "--out", path, "--again"]),
    "report": lambda path: cli.main(["report", path]),
    "save a density": lambda path: density().save(path),
    "save a posterior": lambda path: posterior().save(path),
    "model file": lambda path: write_model(path, "own", {}, {}),
    "checkpoint": train,
    "remove checkpoints": remove_checkpoints,
    "table": lambda path: write_table(Path(path), np.ones((2, 2)), None),
    "picture": lambda path: plot.save(figure(), Path(path), dpi=30.0),
    "record": lambda path: record.write(Path(path), dict(command="ddnf x")),
    "paper's report": lambda path: write_report(Path(path), experiments={}),
    "benchmarks": lambda path: bench_report.write(BENCH, Path(path)),
}
BENCH = dict(command="make bench", parts={}, versions={}, python="", machine="", cores=1)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder to work in, with a table and a model of ours; fits are replaced by cheap ones."""
    monkeypatch.chdir(tmp_path)
    np.save("data.npy", np.random.default_rng(0).normal(size=(20, 2)))
    density().save("fitted.ddnf")

    def fit_density(key, x, condition, *, checkpoint, **_):
        train(checkpoint) if checkpoint is not None else None
        return density()

    def subject(name, **_):
        shown = dict(image=np.ones((2, 2)), extent=(0.0, 1.0, 0.0, 1.0))
        return side_by_side.Subject(name, ["ddnf"], lambda *_, **__: dict(kl=1.0), Settings(), **shown)

    monkeypatch.setattr("ddnf.cli.fit.fit_density", fit_density)
    monkeypatch.setattr(side_by_side, "subject_of", subject)
    monkeypatch.setattr(reproduce, "EXPERIMENTS", dict(toy=EXPERIMENT))
    monkeypatch.setattr(registry, "EXPERIMENTS", {})
    monkeypatch.setattr(bench_report, "_sections", lambda record: [])
    return tmp_path


def chosen(rng: random.Random, folder: Path) -> str:
    """A path to write to: a file or a folder that exists, or one that does not."""
    existing = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "fitted.ddnf"]
    place = rng.choice([".", *existing, *existing, rng.choice(NAMES)])
    return place if rng.random() < 0.7 else place.rstrip("/") + rng.choice(ENDINGS)


def check(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    planted = plant(folder, seed, count=25)
    before = {name: seen for name, seen in snapshot(folder).items() if folder / name in planted}
    for name in rng.sample(list(ACTIONS), len(ACTIONS)):
        path = chosen(rng, folder)
        with contextlib.suppress(ValueError, OSError, SystemExit):
            ACTIONS[name](path)
        after = snapshot(folder)
        assert {file: after.get(file) for file in before} == before, f"{name} changed files; seed {seed}, path {path!r}"
    assert not [path for path in folder.rglob("*.tmp") if path.name.startswith(".ddnf-")]


@pytest.mark.parametrize("seed", range(4))
def test_bystanders_stay(tree, seed, capsys):
    check(tree, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_bystanders_stay_in_many_trees(tree, seed, capsys):
    check(tree, seed)


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_work(tree, name, capsys):
    """The trees would show nothing if an action failed for another reason than a file in its way."""
    train("made")
    before = snapshot(tree)
    ending = {"sample": ".csv", "score": ".csv", "table": ".csv", "picture": ".png"}.get(name, "")
    needs_folder = name in ("report", "paper's report", "benchmarks", "remove checkpoints")
    ACTIONS[name]("made" if needs_folder else f"new{ending}")
    assert snapshot(tree).keys() != before.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_checkpoints_of_every_fit(tmp_path, monkeypatch):
    """`--checkpoint .` and each function with `checkpoint=`, in a folder with a thesis, photos and years."""
    monkeypatch.chdir(tmp_path)
    for name in ("thesis", "photos", "2022", "1", "round-0"):
        Path(name).mkdir()
        Path(name, "file").write_text("mine")
    rows = np.random.default_rng(0).normal(size=(40, 2))
    np.save("data.npy", rows)
    before = snapshot(tmp_path)
    cli.main(["fit", "data.npy", "-o", "model.ddnf", "--steps", "3", "--checkpoint", ".", "--quiet"])
    ddnf.fit_density(jr.key(0), rows, steps=3, progress=False, checkpoint="density")
    target = ddnf.Target(lambda z: -jnp.sum(z**2), 2)
    flow = ddnf.DDNF(jr.key(1), 2)  # one's own flow is always trained
    ddnf.fit_posterior(jr.key(0), target, flow=flow, steps=3, exact="never", progress=False, checkpoint=".")
    after = snapshot(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert len(list(Path().rglob("ddnf-checkpoints"))) >= 3
