"""The house keeps its order: who may import whom, and every public name is documented with an example."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ddnf

SOURCE = Path(ddnf.__file__).parent
# For each room, the rooms of ours that it must not import.
FORBIDDEN = {
    "baselines": {"flow", "inference", "targets", "bridges", "paper", "plot", "cli"},
    "flow": {"inference", "baselines", "targets", "bridges", "paper", "plot", "cli"},
    "inference": {"baselines", "bridges", "paper", "cli"},
    "bridges": {"baselines", "paper", "cli"},
    "targets": {"flow", "inference", "baselines", "bridges", "paper", "plot", "cli"},
    "view.py": {"inference", "baselines", "targets", "bridges", "paper", "plot", "cli"},
    "plot.py": {"flow", "inference", "baselines", "targets", "bridges", "paper", "cli"},
}


def imported_rooms(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("ddnf.")}


@pytest.mark.parametrize("room", FORBIDDEN)
def test_direction_of_imports(room):
    place = SOURCE / room
    for path in [place] if place.suffix else place.rglob("*.py"):
        assert not imported_rooms(path) & FORBIDDEN[room], path


@pytest.mark.parametrize("name", ddnf.__all__)
def test_public_names_are_documented(name):
    doc = inspect.getdoc(getattr(ddnf, name))
    assert doc
    if name not in ("Certificate", "Density", "LogDet", "Path", "Posterior"):
        assert ">>>" in doc, f"{name} has no example"


def test_import_is_light():
    """What only some users need is not imported with the library."""
    heavy = {"arviz", "diffrax", "matplotlib", "numpyro", "orbax", "pandas", "plotly", "pymc", "sklearn", "tyro"}
    code = "import ddnf, sys; print(' '.join({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "jax" in loaded and not set(loaded) & heavy
