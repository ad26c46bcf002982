"""The house keeps its order: who may import whom, and every public name is documented with an example."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ddnf

SOURCE = Path(ddnf.__file__).parent
# For each room, the rooms of ours that it may import.
BASE = {"system", "flow"}
FITS = {"training", "posterior", "density", "vae"}
ALLOWED = {
    "system": set(),
    "flow": set(),
    "flows": BASE,
    "training": {"system"},
    "posterior": BASE | {"flows", "training", "storage"},
    "density": BASE | {"flows", "training", "storage"},
    "vae": BASE | {"flows", "training", "storage"},
    "storage": BASE | {"flows", "posterior", "density", "vae"},
    "bridges": BASE | FITS | {"flows", "storage"},
    "viz": BASE | {"flows"},
    "baselines": {"flows"},
    "cli": BASE | FITS | {"flows", "storage", "bridges", "viz"},
}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_file_is_in_a_room():
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} <= set(ALLOWED)


@pytest.mark.parametrize("room", ALLOWED)
def test_direction_of_imports(room):
    for path in (SOURCE / room).rglob("*.py"):
        names = imported(path)
        rooms = {name.split(".")[1] for name in names if name.startswith("ddnf.")} - {"__version__"}
        assert rooms <= ALLOWED[room] | {room}, path
        assert room == "cli" or not any(name.startswith("ddnf_paper") for name in names), path


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
