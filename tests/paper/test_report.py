"""The report: all that was found is on the page, as text, and the page needs nothing but itself."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.random as jr
import pytest
from matplotlib.figure import Figure

from ddnf import DDNF, cli
from ddnf.viz.view import frames
from ddnf_paper import report
from ddnf_paper.experiment import Claim, Experiment, Picture, ReportTable, run
from tests.cli.test_cli import one_line


@dataclasses.dataclass(frozen=True)
class Config:
    widths: tuple[int, ...] = (2, 3)
    note: str = "<u>plain</u>"


def parts(config, seed):
    def fitted():
        return dict(value=0.25, view=frames(DDNF(jr.key(seed), 2, blocks=1, steps=1, hidden=(2,)), count=3))

    return {"first": lambda: dict(value=0.5), "a flow": fitted}


def pictures(record):
    small, large = Figure(), Figure()
    small.subplots().plot([0, record["parts"]["first"]["value"]])
    large.subplots().plot(range(20_000), [i % 7 for i in range(20_000)], ".")
    return [
        Picture("curve", small, "A line & its <caption>", 'A line that "rises"'),
        Picture("dots", large, "Dots", "Many dots"),
    ]


def experiment(name="fake", **changes):
    made = Experiment(
        name=name,
        title=f"An <em>experiment</em> called {name}",
        about="About <script>alert(1)</script> & more.",
        profiles={"smoke": Config()},
        parts=parts,
        tables=lambda record: [ReportTable("A <table>", ("a<b", "c"), [("1 < 2", "3 & 4"), ("5", "6")])],
        pictures=pictures,
        claims=lambda record: [
            Claim("Faster <b>", "1", str(record["parts"]["first"]["value"]), "reproduced", "measured & found"),
            Claim("Better", "2", "3", "partly", "half"),
            Claim("Longer", "3", "4", "not reproduced", "no"),
        ],
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """A folder with the results of one experiment, of another that was interrupted, and of an older kind."""
    out = tmp_path_factory.mktemp("results")
    record = run(experiment(), out, profile="smoke", seed=3)
    del record["parts"]["a flow"]
    (out / "halted.json").write_text(json.dumps(record))
    (out / "older.json").write_text(json.dumps(dict(results=[1, 2])))
    return out


@pytest.fixture(scope="module")
def text(out) -> str:
    names = ["fake", "halted", "older", "missing"]
    path = report.write(out, experiments={name: experiment(name) for name in names})
    assert path == out / "report" / "index.html"
    return path.read_text("utf-8")


def test_everything_is_there_as_text(text):
    for words in (
        *("Faster &lt;b&gt;", "measured &amp; found", "✓ reproduced", "≈ partly", "✗ not reproduced", "0.5"),
        *("An &lt;em&gt;experiment&lt;/em&gt; called fake", "About &lt;script&gt;alert(1)&lt;/script&gt; &amp; more."),
        *("A &lt;table&gt;", "a&lt;b", "1 &lt; 2", "3 &amp; 4"),
        *("ddnf reproduce fake --profile smoke --seed 3", "[2, 3]", "&lt;u&gt;plain&lt;/u&gt;", "jax ", " cores"),
    ):
        assert words in text
    for raw in ("<b>", "<em>", "<table>\n<u>", "<script>alert", "<u>"):
        assert raw not in text
    # In the summary, and with its numbers in the section.
    assert text.count("Faster &lt;b&gt;") == 2


def test_figures_have_text_for_those_who_cannot_see_them(text):
    images = re.findall(r'<img src="data:image/(svg\+xml|webp);base64,[^"]+" alt="([^"]+)">', text)
    assert images == [("svg+xml", "A line that &#34;rises&#34;"), ("webp", "Many dots")]
    assert text.count("<img") == 2
    assert "<figcaption>A line &amp; its &lt;caption&gt;</figcaption>" in text


def test_what_was_not_run_is_said(text):
    for name, words in (
        ("halted", "interrupted, 1 of 2 parts left"),
        ("older", "not run yet"),
        ("missing", "not run yet"),
    ):
        assert f"called {name}: {words}." in text
        assert f"<pre><code>ddnf reproduce {name}</code></pre>" in text


def test_the_view_holds_the_flows_of_the_record(text):
    data = re.search(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    (name, shown), *others = json.loads(data[1]).items()
    assert name == "An <em>experiment</em> called fake: a flow" and shown["count"] == 3 and not others


def test_nothing_is_loaded_from_elsewhere(text):
    loads = re.findall(r'(?:src|href|action|poster|data)\s*=\s*"([^"]*)"|url\(([^)]*)\)|@import\s+(\S+)', text)
    assert len(loads) > 5
    for load in ("".join(found) for found in loads):
        assert load.startswith(("#", "data:")), load
    assert "default-src 'none'" in text.replace("&#39;", "'")


def test_without_flows_there_is_no_view(out):
    alone = experiment("missing")
    text = report.write(out, experiments={"missing": alone}).read_text("utf-8")
    assert "flow-view" not in text and "<canvas" not in text and "#view" not in text


def test_the_same_results_give_the_same_page(out):
    pages = [report.write(out, experiments={"fake": experiment()}).read_bytes() for _ in range(2)]
    assert pages[0] == pages[1]


def test_report_command(out, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ddnf_paper.registry", SimpleNamespace(EXPERIMENTS={"fake": experiment()}))
    cli.main(["report", str(out)])
    assert str(out / "report" / "index.html") in capsys.readouterr().out
    assert "Expected a folder with results" in one_line(["report", str(out / "nowhere")], capsys)


def test_damaged_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ddnf_paper.registry", SimpleNamespace(EXPERIMENTS={"fake": experiment()}))
    (tmp_path / "fake.json").write_text('{"parts": ')
    assert "Expected the results of a run in" in one_line(["report", str(tmp_path)], capsys)


def test_a_long_experiment_is_reported_before_all_is_done(out, tmp_path):
    (tmp_path / "halted.json").write_text((out / "halted.json").read_text())
    page = report.write(tmp_path, experiments={"halted": experiment("halted", has_checkpoints=True)})
    shown = page.read_text("utf-8")
    assert "interrupted" not in shown and "Many dots" in shown


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.21, "3.2 s"), (59.96, "1 min 0 s"), (200.0, "3 min 20 s"), (7321.0, "2 h 2 min")]
)
def test_time_for_people(seconds, words):
    assert report._time(seconds) == words
