"""The inputs of each chunk of training steps: a key per step, and its rows, from memory or from a stream.

Rows in the memory of one process stay on its devices, and steps receive row numbers. Rows of a `Stream`, and rows that
several processes share, are arranged on the host in the order of the steps, one chunk at a time.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.random as jr
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from ddnf.system.compiling import quick_jit
from ddnf.training.devices import check_batch, copy_to_all, process_count, share_rows, share_steps


@runtime_checkable
class Stream(Protocol):
    """An endless stream of rows in random order, such as those of files that do not fit in memory.

    Attributes:
        count: rows per epoch.
        mark: arrays that identify this stream, for checkpoints.
    """

    count: int
    mark: PyTree

    def take(self, first: int, size: int) -> PyTree:
        """The rows from number `first` on, the same at each call: NumPy arrays with leading axis `size`."""
        ...

    def part(self, rank: int, processes: int) -> "Stream":
        """The stream of one of several processes."""
        ...


class Feed:
    """Keys and rows for the steps of a run.

    Args:
        key: random key of the run.
        data: arrays with a common leading axis, in any pytree; a `Stream`; or None.
        length: steps of a chunk.
        batch: rows of a step, of all processes together.
        mesh: the devices that share them; None for one device.

    Example:
        >>> feed = Feed(jr.key(0), np.arange(6.0), length=2, batch=3, mesh=None)
        >>> keys, rows = feed.inputs(0)
        >>> keys.shape, sorted(np.ravel(rows).tolist())
        ((2,), [0, 1, 2, 3, 4, 5])
    """

    def __init__(self, key: PRNGKeyArray, data: PyTree, *, length: int, batch: int, mesh: Mesh | None):
        self.key, self.length, self.mesh = key, length, mesh
        self.count = data.count if isinstance(data, Stream) else _count(data)
        self.batch = batch if self.count is None else min(batch, self.count)
        if self.count is not None:
            check_batch(mesh, self.batch)
        self.processes = process_count(mesh)
        self.rank = jax.process_index() if self.processes > 1 else 0
        self.is_on_host = isinstance(data, Stream) or (data is not None and self.processes > 1)
        self.mark = data.mark if isinstance(data, Stream) else data
        self.host: Any = data if self.is_on_host else None
        if isinstance(data, Stream) and self.processes > 1:
            self.host = data.part(self.rank, self.processes)
        self.table = None if self.is_on_host else share_rows(mesh, data)

    def inputs(self, chunk: Int[Array | np.ndarray, ""] | int) -> tuple[Array, PyTree]:
        """A key for each step of a chunk, and row numbers of `table`, or rows where there is none."""
        count = None if isinstance(self.host, Stream) else self.count
        keys, numbers = copy_to_all(self.mesh, _drawn(self.key, np.asarray(chunk), count, self.length, self.batch))
        if not self.is_on_host:
            return keys, numbers
        share = self.batch // self.processes
        if isinstance(self.host, Stream):
            taken = self.host.take(int(chunk) * self.length * share, self.length * share)
            rows = jax.tree.map(lambda a: a.reshape(self.length, share, *a.shape[1:]), taken)
        else:
            mine = np.asarray(numbers)[:, self.rank * share : (self.rank + 1) * share]
            rows = jax.tree.map(lambda a: np.asarray(a)[mine], self.host)
        return keys, share_steps(self.mesh, rows)


def _count(data: PyTree) -> int | None:
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(data)}
    if len(lengths) > 1 or lengths & {(), (0,)}:
        raise ValueError(f"Expected data with one common number of rows, at least 1; got {sorted(lengths)}.")
    return None if data is None else int(lengths.pop()[0])


@quick_jit
def _drawn(key, chunk, count, length, batch):
    # A program of its own: random numbers take long to compile, and this one is the same for every model.
    step_key, row_key = jr.split(jr.fold_in(key, chunk))
    return jr.split(step_key, length), _numbers(row_key, count, length, batch)


def _numbers(key, count, length, batch):
    """Row numbers for each step of a chunk, from successive permutations: every row is seen equally often."""
    if count is None:
        return None
    keys = jr.split(key, -(-length * batch // count))
    rows = jax.vmap(lambda key: jr.permutation(key, count))(keys)
    return rows.reshape(-1)[: length * batch].reshape(length, batch)
