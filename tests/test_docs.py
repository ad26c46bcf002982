"""The documentation: every public name in the reference, tutorials that run, and a short README."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from docs._build import links, reference, results, tutorials

import ddnf
from ddnf import flows
from ddnf.cli import app

ROOT = Path(__file__).parents[1]
# Sizes that run in seconds.
TINY = {
    "auto_encoder": ["--epochs", "1", "--images", "200"],
    "large_data": ["--rows", "500", "--steps", "2"],
    "numpyro_posterior": ["--steps", "50", "--draws", "100"],
    "own_parts": ["--steps", "5"],
    "pymc_posterior": ["--steps", "50", "--draws", "100"],
    "simulation_inference": ["--simulations", "300", "--steps", "5"],
    "table_density": ["--steps", "5", "--rows", "100"],
    "trust": ["--steps", "5"],
}
SCRIPTS = {path.stem: path for path in tutorials.scripts(ROOT / "docs")}


def test_every_public_name_has_a_topic():
    """A new public name must be put under a topic of the reference."""
    placed = [name for _, _, names in reference.TOPICS.values() for name in names]
    assert sorted(placed) == sorted(ddnf.__all__)


def test_every_public_name_is_in_the_reference():
    text = "\n".join(reference.pages().values())
    for name in ddnf.__all__:
        assert f"::: ddnf.{name}\n" in text + "\n"
    for name in flows.__all__:
        assert name == "BASELINES" or f"::: ddnf.flows.{name}\n" in text + "\n"
    assert tuple(command.__name__ for command in app.COMMANDS) == reference.COMMANDS
    for command in reference.COMMANDS:
        assert f"## ddnf {command}" in text


def test_results_are_made_from_the_files():
    pages = results.pages()
    assert "✗ not reproduced" in pages["results/claims.md"]
    assert "eight_schools" in pages["results/posteriors.md"]
    assert "nats per row less than the truth" in pages["results/densities.md"]
    assert "settings of the baselines were not tuned" in pages["results/experiments.md"].replace("\n", " ")


def test_every_page_is_in_the_navigation():
    # The configuration of MkDocs has tags of its own in other projects; ours is plain YAML.
    nav = re.findall(r"[\w/]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    made = {*reference.pages(), *results.pages(), "changelog.md"} | {
        f"{path.parent.name}/{path.stem}.md" for path in SCRIPTS.values()
    }
    assert written | made == set(nav)


def test_cells():
    cells = tutorials.cells("# %% [hidden]\nx = 1\n# %% [markdown]\n# # Title\n#\n# Text\n# %%\nx")
    assert [cell.kind for cell in cells] == ["hidden", "markdown", "code"]
    assert cells[1].text == "# Title\n\nText"


def test_a_page_has_code_output_and_pictures(tmp_path):
    script = tmp_path / "small.py"
    script.write_text(
        "# %% [hidden]\nimport argparse, matplotlib.pyplot as plt\noptions = argparse.Namespace(rows=[[1, 2]])\n"
        "# %% [markdown]\n# Text\n# %%\nx = 2\nprint(x)\nx + 1\n"
        "# %%\nplt.plot([1, 2])\n# %%\nplt.imshow(options.rows)\n"
    )
    tutorials.render(script, tmp_path)
    page = (tmp_path / "small.md").read_text()
    assert "Text\n\n```python\nx = 2" in page and "```text\n2\n3\n```" in page and "import matplotlib" not in page
    assert [len(list(tmp_path.glob(f"small-*.{kind}"))) for kind in ("svg", "png")] == [1, 1] and "Line2D" not in page
    assert "plt.imshow([[1, 2]])" in page


def test_broken_links_are_found(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "index.html").write_text("<h1 id='top'>Title</h1><img src='picture.png'>")
    good = "<a href='folder/'>1</a><a href='folder/#top'>2</a><a href='https://example.org/x'>3</a><a href='?q#'>4</a>"
    (tmp_path / "start.html").write_text(f"{good}<a href='gone.html'>5</a><a href='folder/index.html#gone'>6</a>")
    found = ["folder/index.html: picture.png", "start.html: gone.html", "start.html: folder/index.html#gone"]
    assert links.broken(tmp_path) == found


def test_every_tutorial_is_run():
    assert set(SCRIPTS) == set(TINY)


def _run_python(arguments, folder):
    """Runs Python in a process of its own, in an empty folder."""
    environment = dict(PYTHONPATH=str(ROOT / "src"), MPLBACKEND="agg", PATH="", HOME=str(folder), JAX_PLATFORMS="cpu")
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_tutorials_run(name, tmp_path):
    done = _run_python([str(SCRIPTS[name]), *TINY[name]], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["start.md", "guides/migrating.md"])
def test_examples_of_a_page_run(page, tmp_path):
    """The Python blocks of a page, one after the other, as a reader would paste them."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text("utf-8"), re.S)
    assert len(blocks) >= 2
    done = _run_python(["-c", "\n".join(blocks)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 140


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None and citation["version"] == newest[1] == ddnf.__version__
