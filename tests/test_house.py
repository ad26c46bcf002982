"""Which room may import which, public names only outside of the library, and every public name documented."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ddnf

SOURCE = Path(ddnf.__file__).parent
ROOT = Path(__file__).parents[1]
# For each room, the rooms of ours that it may import.
BASE = {"system", "flow"}
FITS = {"training", "posterior", "density", "vae"}
ALLOWED = {
    "system": set(),
    "flow": {"system"},
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


def public_names(room: str) -> list[str]:
    """`__all__` of a room, or of ddnf itself for an empty name."""
    return importlib.import_module(f"ddnf.{room}".rstrip(".")).__all__


@pytest.mark.parametrize(
    "path", [*(ROOT / "src" / "ddnf_paper").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")], ids=lambda p: p.name
)
def test_experiments_and_benchmarks_use_public_names(path):
    """`from ddnf import name` or `from ddnf.<room> import name`, with the name in the `__all__` there."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("ddnf.") for alias in node.names), path
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ddnf":
            room = node.module.partition(".")[2]
            assert room in ("", *ALLOWED), f"{path} imports {node.module}"
            names = {alias.name for alias in node.names}
            assert names <= set(public_names(room)), f"{path} imports {names} from {node.module}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ddnf":
            assert node.attr in (*ddnf.__all__, "__version__"), f"{path} uses ddnf.{node.attr}"


def test_no_private_jax():
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        assert "jax._src" not in path.read_text(), path


def test_files_and_functions_are_short():
    for path in (ROOT / "src").rglob("*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, path
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                assert length <= 60, f"{path}: {node.name}"


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


@pytest.mark.parametrize(
    "name",
    ["flows.make", "bridges.sklearn.DDNFDensity", "bridges.numpyro", "viz.plot.gallery", "viz.view.page", "cli.main"],
)
def test_rooms_are_imported_when_used(name):
    code = f"import ddnf; print(ddnf.{name})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_does_not_start_jax():
    """Before its first computation JAX can still be configured, and the process forked."""
    code = "import ddnf, jax; jax.config.update('jax_num_cpu_devices', 3); print(jax.device_count())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert asked.stdout.split() == ["3"]
