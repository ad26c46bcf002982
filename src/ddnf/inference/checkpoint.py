"""Checkpoints of a run by orbax: written whole or not at all, and taken up by the run that wrote them only."""

import hashlib
import time
from os import PathLike
from pathlib import Path

import jax
import numpy as np
from jaxtyping import PyTree

from ddnf.optional import require


class Checkpoints:
    """The checkpoints of one run in a folder, the last two of them; does nothing without a folder.

    Args:
        folder: where they are, or None.
        seconds: time between two of them.
        mark: the run's `fingerprint`, so that no run takes up another's state.
    """

    def __init__(self, folder: str | PathLike | None, seconds: float, mark: str):
        self.folder = None if folder is None else Path(folder).expanduser().absolute()
        self.seconds, self.mark = seconds, mark
        self.manager, self.last = None, time.monotonic()

    def __enter__(self):
        if self.folder is not None:
            ocp = require("orbax.checkpoint", "checkpoint")
            _usable(self.folder)
            options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=False)
            self.manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "run"))
        return self

    def __exit__(self, *_):
        if self.manager is not None:
            self.manager.close()

    def restore(self, state: PyTree) -> PyTree:
        """The last state in the folder, in the shape of `state`; `state` itself if there is none."""
        if self.manager is None or self.manager.latest_step() is None:
            return state
        import orbax.checkpoint as ocp

        leaves, structure = jax.tree.flatten(state)
        named = _named(leaves)
        step = self.manager.latest_step()
        run = self.manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
        if run["mark"] != self.mark:
            raise ValueError(
                f"Expected the checkpoint in {self.folder} to be of this run; got one of a run with other arguments, "
                "data or key. Use another folder, or delete it."
            )
        found = self.manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(named))).state
        return structure.unflatten([found[name] for name in named])

    def save(self, state: PyTree, *, last: bool) -> None:
        """Writes the state if it is time to, or if it is the last."""
        if self.manager is None or not (last or time.monotonic() - self.last >= self.seconds):
            return
        import orbax.checkpoint as ocp

        args = ocp.args.Composite(
            state=ocp.args.StandardSave(_named(jax.tree.leaves(state))), run=ocp.args.JsonSave(dict(mark=self.mark))
        )
        self.manager.save(int(state.stretch), args=args, force=True)
        self.last = time.monotonic()


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


def _usable(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Expected a folder for checkpoints; got {str(folder)!r} ({error.strerror}).") from error
