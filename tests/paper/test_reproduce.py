"""The command: runs what is left, draws from the JSON, and says in one line what is wrong."""

import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from ddnf import cli
from ddnf_paper import registry, reproduce
from ddnf_paper.experiment import Claim, Experiment, Picture, ReportTable, run
from ddnf_paper.record import plain


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 3


def make(parts, name="tiny", size=3):
    """An experiment with these parts."""

    def pictures(record):
        figure = Figure()
        figure.subplots().plot(record["parts"]["first"]["values"])
        return [Picture("curve", figure, "A curve.", "A curve.")]

    return Experiment(
        name,
        "Tiny",
        "Nothing.",
        dict(smoke=Config(size)),
        lambda config, seed: {part: lambda work=work: work(config, seed) for part, work in parts.items()},
        lambda record: [ReportTable("Values.", ("first",), [("1",)])],
        pictures,
        lambda record: [Claim("It runs", "yes", "yes", "reproduced", "Seen.")],
    )


def good(config, seed):
    return dict(values=jnp.arange(config.size) / 3, seed=seed)


def bad(config, seed):
    raise KeyboardInterrupt


def test_resume_does_what_is_left(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(make(dict(first=good, second=bad)), tmp_path, profile="smoke")
    kept = json.loads((tmp_path / "tiny.json").read_text())
    assert list(kept["parts"]) == ["first"]
    record = run(make(dict(first=bad, second=good)), tmp_path, profile="smoke")
    assert record["parts"] == dict(first=kept["parts"]["first"], second=dict(values=[0.0, 0.33333, 0.66667], seed=0))
    assert record == json.loads((tmp_path / "tiny.json").read_text())


@pytest.mark.parametrize("change", [dict(seed=1), dict(size=4)])
def test_other_runs_are_neither_taken_over_nor_lost(tmp_path, change):
    run(make(dict(first=good)), tmp_path, profile="smoke")
    before = (tmp_path / "tiny.json").read_text()
    experiment = make(dict(first=bad), size=change.pop("size", 3))
    with pytest.raises(ValueError, match="of 'ddnf reproduce tiny --profile smoke --seed 0'"):
        run(experiment, tmp_path, profile="smoke", **change)
    assert (tmp_path / "tiny.json").read_text() == before
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path, profile="smoke", resume=False, **change)


def test_killed_run_resumes(tmp_path):
    code = f"""
import os, pathlib, signal
from tests.paper.test_reproduce import good, make, run
experiment = make(dict(first=good, second=lambda *_: os.kill(os.getpid(), signal.SIGKILL)))
run(experiment, pathlib.Path({str(tmp_path)!r}), profile="smoke")
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert killed.returncode == -9
    record = run(make(dict(first=bad, second=good)), tmp_path, profile="smoke")
    assert list(record["parts"]) == ["first", "second"]


def test_again(tmp_path):
    """Only what is wanted is run anew; other settings are an error before anything is taken out."""
    run(make(dict(first=good, second=good)), tmp_path, profile="smoke")
    before = (tmp_path / "tiny.json").read_text()
    with pytest.raises(ValueError, match="Expected an --out without results"):
        run(make(dict(first=bad)), tmp_path, profile="smoke", seed=1, again=True)
    assert (tmp_path / "tiny.json").read_text() == before
    experiment = make(dict(first=bad, second=lambda config, seed: dict(values=[7.0])))
    record = run(experiment, tmp_path, profile="smoke", again=True, wanted=lambda name: name == "second")
    assert record["parts"]["second"] == dict(values=[7.0]) and len(record["parts"]["first"]["values"]) == 3


@pytest.mark.parametrize("content", ["{", "{}", '{"parts": {}, "config": {}, "seed": 0}', "notes"])
@pytest.mark.parametrize("options", [dict(), dict(resume=False), dict(again=True)])
def test_a_file_that_is_not_ours_stays(tmp_path, content, options):
    (tmp_path / "tiny.json").write_text(content)
    (tmp_path / "tiny.tmp").write_text("mine")
    (tmp_path / "tiny-checkpoints" / "first" / "2022").mkdir(parents=True)
    (tmp_path / "tiny-checkpoints" / "first" / "2022" / "photo").write_text("mine")
    with pytest.raises(ValueError, match="or results of ddnf to replace"):
        run(make(dict(first=good)), tmp_path, profile="smoke", **options)
    assert (tmp_path / "tiny.json").read_text() == content
    (tmp_path / "tiny.json").unlink()
    run(make(dict(first=good)), tmp_path, profile="smoke", **options)
    assert (tmp_path / "tiny.tmp").read_text() == "mine"
    assert (tmp_path / "tiny-checkpoints" / "first" / "2022" / "photo").read_text() == "mine"


def test_plain():
    value = dict(
        a=np.array([[1.23456789, np.inf]]), b=[np.float32(2), 3, "x", None, True], c=float("nan"), d=np.arange(2)
    )
    assert plain(value) == dict(a=[[1.2346, None]], b=[2.0, 3, "x", None, True], c=None, d=[0, 1])
    json.dumps(plain(value), allow_nan=False)


def test_command(tmp_path, monkeypatch, capsys):
    tiny = {name: make(dict(first=good), name) for name in ("tiny", "other")}
    monkeypatch.setattr(reproduce, "EXPERIMENTS", tiny)
    monkeypatch.setattr(reproduce, "report", lambda out: out / "report" / "index.html")
    out = tmp_path / "new" / "results"
    cli.main(["reproduce", "tiny", "--profile", "smoke", "--out", str(out), "--seed", "2"])
    shown = capsys.readouterr().out
    for path in (out / "tiny.json", out / "figures" / "tiny-curve.png"):
        assert str(path) in shown and path.stat().st_size > 100
    assert str(out / "report" / "index.html") in shown
    assert not (out / "other.json").exists()
    record = json.loads((out / "tiny.json").read_text())
    assert record["command"] == "ddnf reproduce tiny --profile smoke --seed 2" and record["cores"] > 0
    cli.main(["reproduce", "--profile", "smoke", "--out", str(out), "--no-resume"])
    assert (out / "other.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "Expected experiments of accuracy"),
        (["accuracy", "--out", "file"], "Expected a folder that may be written; got 'file'"),
        (["accuracy", "--seed", "-1"], "Expected a seed"),
    ],
)
def test_bad_input_is_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as raised:
        cli.main(["reproduce", *arguments])
    shown = capsys.readouterr().err
    assert raised.value.code == 2 and words in shown and shown.count("\n") == 1


def test_all_experiments_are_named_in_the_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(name in shown for name in registry.EXPERIMENTS)
