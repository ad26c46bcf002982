"""Checkpoints of a run by orbax: written whole or not at all, and taken up by the run that wrote them only."""

import hashlib
import shutil
import time
import warnings
from os import PathLike
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ddnf.system.optional import require


class Checkpoints:
    """The checkpoints of one run in a folder, the last two of them; does nothing without a folder.

    Args:
        folder: where they are, or None.
        seconds: time between two of them.
        mark: the run's `fingerprint`, so that no run takes up another's state.
    """

    def __init__(self, folder: str | PathLike | None, seconds: float, mark: str):
        self.folder = None if folder is None else Path(folder).expanduser().absolute()
        self.seconds, self.last = seconds, time.monotonic()
        if self.folder is None:
            return
        self._orbax = require("orbax.checkpoint", "checkpoint").PyTreeCheckpointer()
        _mark(self.folder, mark)
        for leftover in self.folder.iterdir():
            # What was being written or deleted when the run was killed.
            if leftover.is_dir() and not leftover.name.isdigit():
                shutil.rmtree(leftover, ignore_errors=True)

    def restore(self, state: PyTree) -> PyTree:
        """The last whole state in the folder, in the shape of `state`; `state` itself if there is none."""
        leaves, structure = jax.tree.flatten(state)
        for path in self._paths():
            try:
                found = self._orbax.restore(path)
                values = [jnp.asarray(found[name], leaf.dtype) for name, leaf in _named(leaves).items()]
            except Exception as error:  # orbax raises all sorts of things at files that are not whole
                warnings.warn(f"The checkpoint {path} can't be read ({error}); an older one is tried.", stacklevel=2)
                continue
            return structure.unflatten(values)
        return state

    def save(self, state: PyTree, number: int, *, last: bool) -> None:
        """Writes the state if it is time to, or if it is the last."""
        if self.folder is None or not (last or time.monotonic() - self.last >= self.seconds):
            return
        arrays = {name: np.asarray(leaf) for name, leaf in _named(jax.tree.leaves(state)).items()}
        self._orbax.save(self.folder / str(number), arrays, force=True)
        for old in self._paths()[2:]:
            gone = old.rename(old.with_name(f"{old.name}.old"))
            shutil.rmtree(gone, ignore_errors=True)
        self.last = time.monotonic()

    def _paths(self) -> list[Path]:
        """Checkpoints, the newest first. They get their names when they are whole."""
        if self.folder is None:
            return []
        paths = [path for path in self.folder.iterdir() if path.name.isdigit()]
        return sorted(paths, key=lambda path: -int(path.name))


def fingerprint(arrays: PyTree, *numbers: int) -> str:
    """A digest of all that decides a run.

    Example:
        >>> import jax.numpy as jnp
        >>> fingerprint(jnp.ones(2), 3) == fingerprint(jnp.ones(2), 4)
        False
    """
    digest = hashlib.sha256(repr((numbers, jax.tree.structure(arrays).num_leaves)).encode())
    for leaf in jax.tree.leaves(arrays):
        leaf = np.asarray(leaf)
        digest.update(repr((leaf.shape, str(leaf.dtype))).encode() + leaf.tobytes())
    return digest.hexdigest()


def _named(leaves):
    return {f"{number:05d}": leaf for number, leaf in enumerate(leaves)}


def _mark(folder: Path, mark: str) -> None:
    """Writes the run's mark into the folder, or checks that it is the one there."""
    file = folder / "run.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            draft = file.with_suffix(".draft")
            draft.write_text(mark)
            draft.replace(file)
    except OSError as error:
        raise ValueError(f"Expected a folder for checkpoints; got {str(folder)!r} ({error.strerror}).") from error
    if file.read_text() != mark:
        raise ValueError(
            f"Expected the checkpoint in {str(folder)!r} to be of this run; got one of a run with other arguments, "
            "data or key. Use another folder, or delete it."
        )
