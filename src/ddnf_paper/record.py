"""Result files: strict JSON, written atomically, with the environment they were made in."""

import json
import math
import os
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ddnf.system import check_overwrite, write_atomic

# Prefixes of the `command` in records that ddnf wrote.
_COMMANDS = ("ddnf ", "make bench", "python -m benchmarks", "python benchmarks/")


def plain(value: Any, digits: int = 5) -> Any:
    """Converts to JSON values: arrays become lists, rounded to significant digits; NaN and infinity become null.

    Example:
        >>> import numpy as np
        >>> plain(dict(a=np.array([1 / 3, np.nan]), b=(0.5, 2)))
        {'a': [0.33333, None], 'b': [0.5, 2]}
    """
    if isinstance(value, Mapping):
        return {name: plain(entry, digits) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, digits) for entry in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        rounded = np.vectorize(lambda number: float(f"{number:.{digits}g}"), otypes=[float])
        array = np.asarray(value)
        return plain((rounded(array) if array.dtype.kind == "f" else array).tolist(), digits)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment() -> dict[str, Any]:
    """Versions of packages, the number of cores, and the git revision if there is one.

    Example:
        >>> sorted(environment())
        ['cores', 'revision', 'versions']
    """
    versions = {package: version(package) for package in ("ddnf", "jax", "flowjax", "numpy")}
    return dict(versions=versions, cores=os.cpu_count(), revision=_revision())


def _revision() -> str | None:
    """The git revision of a checkout; None without one."""
    here = Path(__file__).parent
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return asked.stdout.strip() or None


def read(path: Path) -> dict[str, Any]:
    """Reads a record that `write` has written."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"Expected the results of a run in {str(path)!r}; got {error}. Delete it.") from error


def write(path: Path, record: Mapping[str, Any], *, indented: bool = False) -> None:
    """Writes a record atomically, one line per entry: readable at the top, and compact; or `indented` throughout."""
    lines = [f" {json.dumps(name)}: {json.dumps(entry, allow_nan=False)}" for name, entry in record.items()]
    text = json.dumps(record, indent=1, allow_nan=False) if indented else "{\n" + ",\n".join(lines) + "\n}"
    check_record(path)
    write_atomic(path, text + "\n")


def check_record(path: Path) -> None:
    """Raises a ValueError if there is a file at `path` that is not a record of one of our commands."""
    check_overwrite(path, kind="results of ddnf", is_ours=_is_record)


def _is_record(path: Path) -> bool:
    try:
        command = json.loads(path.read_text("utf-8"))["command"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return False
    return isinstance(command, str) and command.startswith(_COMMANDS)
