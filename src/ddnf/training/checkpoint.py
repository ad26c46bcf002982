"""Checkpoints of a training run: written by Orbax, and resumed only by the run that wrote them.

Checkpoints are in a subfolder `ddnf-checkpoints` with a marker file, and each checkpoint has its own marker. Other
files in these folders are neither read nor removed.
"""

import contextlib
import dataclasses
import hashlib
import inspect
import json
import secrets
import shutil
import time
import warnings
from collections.abc import Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import PyTree

from ddnf.system.files import claim_folder
from ddnf.system.optional import require

SUBFOLDER = "ddnf-checkpoints"
_MARKER = "ddnf-checkpoint.json"
_STATE = "state"
_REMOVED = ".ddnf-removed-"


class Checkpoints:
    """The last two checkpoints of one run. Without a folder, does nothing.

    Args:
        folder: where their subfolder is, or None.
        seconds: time between two checkpoints.
        run: the run's `fingerprint`; a run with another one cannot resume from this folder.
    """

    def __init__(self, folder: str | PathLike | None, seconds: float, run: str):
        self.folder = None if folder is None else _subfolder(folder)
        self.seconds, self.last = seconds, time.monotonic()
        if self.folder is None:
            return
        self._orbax = _checkpointer()
        self._marker = json.dumps(dict(format="ddnf checkpoint", run=run))
        if claim_folder(self.folder, _MARKER, self._marker) != self._marker:
            raise ValueError(
                f"Expected checkpoints of this run in {str(self.folder)!r}; got checkpoints of a run with different "
                "arguments, data or key. Use another folder, or delete this one."
            )
        for path in _checkpoints(self.folder):
            if not (path / _STATE).is_dir():  # the run was killed while it wrote or removed this one
                _remove(path)

    def restore(self, state: PyTree) -> PyTree:
        """The newest complete state in the folder, with the structure of `state`; `state` itself if there is none."""
        leaves, structure = jax.tree.flatten(state)
        for path in self._complete():
            try:
                found = self._orbax.restore(path / _STATE)
                values = [jnp.asarray(found[name], leaf.dtype) for name, leaf in _named(leaves).items()]
            except Exception as error:  # orbax raises many kinds of errors for damaged files
                warnings.warn(f"The checkpoint {path} cannot be read ({error}); trying an older one.", stacklevel=2)
                continue
            return structure.unflatten(values)
        return state

    def save(self, state: PyTree, number: int, *, last: bool) -> None:
        """Writes the state if `seconds` have passed since the last checkpoint, or if `last`."""
        if self.folder is None or not (last or time.monotonic() - self.last >= self.seconds):
            return
        arrays = {name: np.asarray(leaf) for name, leaf in _named(jax.tree.leaves(state)).items()}
        path = self.folder / str(number)
        claim_folder(path, _MARKER, self._marker)
        self._orbax.save(path / _STATE, arrays, force=True)
        for old in self._complete()[2:]:
            _remove(old)
        self.last = time.monotonic()

    def _complete(self) -> list[Path]:
        """Complete checkpoints, the newest first. Orbax gives a state its name when it is complete."""
        paths = [] if self.folder is None else _checkpoints(self.folder)
        return sorted((path for path in paths if (path / _STATE).is_dir()), key=lambda path: -int(path.name))


def remove_checkpoints(folder: str | PathLike) -> None:
    """Removes the checkpoints in a folder, and the folder itself if nothing else is in it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "thesis.txt").write_text("mine")
        >>> Checkpoints(folder, 0.0, "run").save({"x": jnp.ones(2)}, 1, last=True)
        >>> remove_checkpoints(folder)
        >>> [path.name for path in folder.iterdir()]
        ['thesis.txt']
    """
    ours = _subfolder(folder)
    if not _is_marked(ours):
        return
    for path in _checkpoints(ours):
        _remove(path)
    (ours / _MARKER).unlink()
    for empty in (ours, ours.parent):
        with contextlib.suppress(OSError):
            empty.rmdir()


def fingerprint(arrays: PyTree, *settings: Any) -> str:
    """A digest of everything that determines a run: its arrays, and settings that `described` can tell apart.

    Example:
        >>> import jax.numpy as jnp
        >>> fingerprint(jnp.ones(2), 3) == fingerprint(jnp.ones(2), 4)
        False
    """
    digest = hashlib.sha256(repr((described(settings), jax.tree.structure(arrays).num_leaves)).encode())
    for leaf in jax.tree.leaves(arrays):
        digest.update(_bytes(np.asarray(leaf)))
    return digest.hexdigest()


def described(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Numbers, text and digests of arrays in a setting, such as the fields of a loss and what functions close over.

    The same in each process, as it has no addresses; devices are left out. `above` are the ids of what contains it.

    Example:
        >>> def scaled(rate):
        ...     return lambda x: rate * x
        >>> described(scaled(0.1))
        ['scaled.<locals>.<lambda>', [0.1]]
    """
    if id(value) in above or isinstance(value, jax.sharding.Mesh):
        return None
    if value is None or isinstance(value, str | bytes | bool | int | float | complex):
        return value
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return hashlib.sha256(_bytes(value)).hexdigest()
    name, parts = _parts(value)
    return [name, [described(part, (*above, id(value))) for part in parts]]


def _parts(value: Any) -> tuple[str, Sequence[Any]]:
    """The name of a container, an object or a function, and what is in it."""
    name = type(value).__qualname__
    if isinstance(value, dict):
        return name, [*map(str, value), *value.values()]
    if isinstance(value, list | tuple):
        return name, value
    if isinstance(value, partial):
        return name, [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return name, [value.__func__, value.__self__]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return name, [getattr(value, field.name) for field in dataclasses.fields(value)]
    function = inspect.unwrap(value) if callable(value) else None
    if not isinstance(function, FunctionType):
        return name, []
    return function.__qualname__, [*inspect.getclosurevars(function).nonlocals.values()]


def _bytes(array: Any) -> bytes:
    array = np.asarray(jr.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array)
    return repr((array.shape, str(array.dtype))).encode() + array.tobytes()


def _checkpointer():
    orbax = require("orbax.checkpoint", "checkpoint")
    if jax.process_count() == 1:
        return orbax.PyTreeCheckpointer()
    # The first process writes alone: orbax would wait for the others otherwise.
    alone = dict(multiprocessing_options=orbax.options.MultiprocessingOptions(0, {0}, "ddnf"))
    return orbax.Checkpointer(orbax.PyTreeCheckpointHandler(**alone), **alone)


def _named(leaves):
    return {f"{number:05d}": leaf for number, leaf in enumerate(leaves)}


def _subfolder(folder: str | PathLike) -> Path:
    return Path(folder).expanduser().absolute() / SUBFOLDER


def _is_marked(folder: Path) -> bool:
    """Whether a folder, not a link to one, has our marker file."""
    try:
        is_folder = folder.is_dir() and not folder.is_symlink()
        return is_folder and json.loads((folder / _MARKER).read_text("utf-8"))["format"] == "ddnf checkpoint"
    except (OSError, ValueError, TypeError, LookupError):
        return False


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.isdecimal() and _is_marked(path)]


def _remove(path: Path) -> None:
    """Removes what we wrote into the folder of a checkpoint, and the folder if nothing else is in it."""
    with contextlib.suppress(FileNotFoundError):
        # Renamed first, so that a partly removed state is never mistaken for a complete one.
        (path / _STATE).rename(path / f"{_REMOVED}{secrets.token_hex(8)}")
    for pattern in (f"{_REMOVED}*", f"{_STATE}.orbax-checkpoint-tmp*"):
        for entry in path.glob(pattern):
            shutil.rmtree(entry, ignore_errors=True)
    (path / _MARKER).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()
