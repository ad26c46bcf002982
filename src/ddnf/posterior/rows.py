"""Rows of data under a log-likelihood: sums over all of them in chunks, with bounded memory.

A chunk of rows and a block of points are computed at once, small enough for the caches of a CPU. Sums over chunks are
taken on the host in double precision: in single precision, the log-likelihood of a million rows has two decimals.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from ddnf.posterior.programs import Density, Programs, compile_once
from ddnf.system.parquet import is_dataset, open_columns
from ddnf.training.devices import copy_to_all, on_all, share_rows, wait_for

# Rows and points that are computed at once.
CHUNK = 8192
_POINTS = 8
# Directions of a Hessian at once.
_DIRECTIONS = 8


class Rows:
    """A log prior, and the log-likelihood of rows that are independent given a point.

    Args:
        log_prior: function of one point.
        log_likelihood: from a point and k rows to the log-likelihood of each, shape (k,).
        data: arrays with a common leading axis, one entry per row, in any pytree; NumPy memory maps and columns of
            Parquet files stay on disk.
        dim: dimension of a point.
        least: minimum number of rows that represent all rows in training; None for the default.
        weight: how many rows each row represents.
        chunk: rows that are computed at once; None for the default.

    Example:
        >>> rows = Rows(lambda z: -jnp.sum(z**2) / 2, lambda z, y: -((y - z[0]) ** 2) / 2, np.arange(3.0), 1)
        >>> rows.count, rows.take(np.array([2, 0])).tolist()
        (3, [2.0, 0.0])
    """

    def __init__(
        self,
        log_prior: Callable[[Array], Array],
        log_likelihood: Callable[[Array, Any], Array],
        data: PyTree,
        dim: int,
        least: int | None = None,
        weight: float = 1.0,
        chunk: int | None = None,
    ):
        self.log_prior, self.log_likelihood, self.data = log_prior, log_likelihood, data
        self.dim, self.least, self.weight, self.chunk = dim, least, weight, chunk
        self.count = _count(data)
        self._check()

    def slice(self, start: int, stop: int) -> PyTree:
        """Rows in the order of the data."""
        return jax.tree.map(lambda array: _native(np.asarray(array[start:stop])), self.data)

    def take(self, indices: Int[np.ndarray, " k"]) -> PyTree:
        """Rows by their numbers."""
        order = np.argsort(indices, kind="stable")  # files are read in their own order
        back = np.argsort(order, kind="stable")
        return jax.tree.map(lambda array: _native(np.asarray(array[indices[order]])[back]), self.data)

    def some(self, indices: Int[np.ndarray, " k"]) -> "Rows":
        """Some of the rows, representing all of them, with the same programs."""
        chunk = min(CHUNK if self.chunk is None else self.chunk, self.count)
        functions, weight = (self.log_prior, self.log_likelihood), self.weight * self.count / len(indices)
        return Rows(*functions, self.take(indices), self.dim, self.least, weight, chunk)

    def log_density(self, z: Float[Array, " dim"]) -> Float[Array, ""]:
        """The log density with all rows, as a function that JAX can trace."""
        total = sum_in_chunks(self.log_likelihood, z, jax.tree.map(jnp.asarray, self.data))
        return self.log_prior(z) + self.weight * total

    def _check(self):
        point = jax.ShapeDtypeStruct((self.dim,), jnp.result_type(float))
        row = self.slice(0, 1)
        try:
            found = jax.eval_shape(self.log_likelihood, point, row)
        except Exception as error:
            first = str(error).strip().splitlines() or [type(error).__name__]
            message = f"Expected a log_likelihood that JAX can trace at a point of shape ({self.dim},) and a row"
            raise ValueError(f"{message}; it raised {type(error).__name__}: {first[0]}") from error
        if getattr(found, "shape", None) != (1,):
            got = getattr(found, "shape", (type(found).__name__,))[1:]
            raise ValueError(f"Expected log_likelihood to return a scalar for each row; got shape {got}.")


def rows_from(log_prior: Callable, log_likelihood: Callable | None, rows: Any, dim: int) -> Rows | None:
    """Rows from the arguments of a `Target`: data and a function of one row, or rows already; None without."""
    if isinstance(rows, Rows):
        return rows
    if (rows is None) != (log_likelihood is None):
        raise ValueError("Expected rows and log_likelihood, a function of a point and one row; got one of the two.")
    if rows is None:
        return None
    if not callable(log_likelihood):
        raise ValueError(f"Expected log_likelihood to be a function; got {log_likelihood!r}.")
    data = open_columns(rows) if is_dataset(rows) else rows
    return Rows(log_prior, lambda z, rows: jax.vmap(log_likelihood, (None, 0))(z, rows), data, dim)


def sum_in_chunks(
    log_likelihood: Callable, z: Float[Array, " dim"], data: PyTree, offsets: Float[Array, " n"] | float = 0.0
) -> Float[Array, ""]:
    """The sum of log-likelihoods minus offsets over rows; of many rows chunk by chunk, also in its derivatives.

    Example:
        >>> float(sum_in_chunks(lambda z, y: z[0] * y, jnp.ones(1), jnp.ones(20_000)))
        20000.0
    """
    count = _count(data)
    offsets = jnp.broadcast_to(jnp.asarray(offsets), (count,))
    if count <= 8 * CHUNK:
        return jnp.sum(log_likelihood(z, data) - offsets)

    @jax.checkpoint
    def part(number):
        # The last chunk overlaps the previous one, and does not count its rows again.
        first = jnp.minimum(number * CHUNK, count - CHUNK)
        cut = [lax.dynamic_slice_in_dim(a, first, CHUNK) for a in (*jax.tree.leaves(data), offsets)]
        rows = jax.tree.unflatten(jax.tree.structure(data), cut[:-1])
        is_new = first + jnp.arange(CHUNK) >= number * CHUNK
        return jnp.sum(jnp.where(is_new, log_likelihood(z, rows) - cut[-1], 0.0))

    return jnp.sum(lax.map(part, jnp.arange(-(-count // CHUNK))))


class RowPrograms(Programs):
    """As `Programs`, for a density with rows: each call passes over all rows once, `chunk` of them at a time.

    The devices of a mesh share the rows of a chunk.

    Example:
        >>> rows = Rows(lambda z: -jnp.sum(z**2) / 2, lambda z, y: -((y - z[0]) ** 2) / 2, np.ones(3), 1)
        >>> programs = RowPrograms(rows)
        >>> programs.values(np.zeros((2, 1))).tolist(), programs.hessian(np.zeros(1)).tolist()
        ([-1.5, -1.5], [[-4.0]])
    """

    def __init__(self, rows: Rows, chunk: int | None = None, mesh: Mesh | None = None):
        self.rows, self.mesh = rows, mesh
        self._dtype = jnp.result_type(float)
        self._programs, self._only = {}, None
        self._chunk = self._size(rows.chunk or min(CHUNK if chunk is None else chunk, rows.count))

    @cached_property
    def density(self) -> Density:
        """The density with all rows in one program; they are read into memory."""
        point = jax.ShapeDtypeStruct((self.rows.dim,), self._dtype)
        traced = jax.make_jaxpr(self.rows.log_density)(point)
        return Density(traced.jaxpr, copy_to_all(self.mesh, [jnp.asarray(array) for array in traced.consts]))

    @property
    def has_large_matrices(self) -> bool:
        return False

    def values(self, z: Float[Array | np.ndarray, "n dim"]) -> Float[np.ndarray, " n"]:
        return self._total("values", _values, z, _POINTS)[0]

    def gradients(
        self, z: Float[Array | np.ndarray, "n dim"]
    ) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, "n dim"]]:
        values, gradients = self._total("gradients", _gradients, z, _POINTS)
        return values, gradients

    def gradient(self, z: Float[np.ndarray, " dim"]) -> tuple[float, Float[np.ndarray, " dim"]]:
        values, gradients = self._total("gradient", _gradients, np.asarray(z)[None], 1)
        return float(values[0]), gradients[0]

    def hessian(self, z: Float[np.ndarray, " dim"]) -> Float[np.ndarray, "dim dim"]:
        hessian = self._total("hessian", _hessian, np.asarray(z)[None], 1)[0][0]
        return (hessian + hessian.T) / 2

    def _total(self, name, function, z, size) -> list[np.ndarray]:
        """Sums over all chunks of the outputs of `function`; the prior is in the first."""
        z = np.asarray(z, self._dtype)
        blocks = [z[first : first + size] for first in range(0, len(z), size)]
        blocks = [np.concatenate([b, np.repeat(b[-1:], size - len(b), axis=0)]) for b in blocks]
        blocks = copy_to_all(self.mesh, blocks)
        totals: list[Any] = [None] * len(blocks)
        program = self._compiled(name, function, size)
        for start in range(0, self.rows.count, self._chunk):
            part = self._part(start)
            found = [program(block, *part) for block in blocks]  # dispatched before any is waited for
            for number, outputs in enumerate(found):
                outputs = [np.asarray(output, float) for output in outputs]
                known = totals[number]
                totals[number] = outputs if known is None else [a + b for a, b in zip(known, outputs, strict=True)]
        return [np.concatenate(parts)[: len(z)] for parts in zip(*totals, strict=True)]

    def _part(self, start: int) -> tuple[PyTree, Array, Array]:
        """A chunk of rows; it stays on the device where it is the only one."""
        if self.rows.count > self._chunk:
            return self._padded(start)
        self._only = self._padded(0) if self._only is None else self._only
        return self._only

    def _padded(self, start: int) -> tuple[PyTree, Array, Array]:
        """A chunk of rows, the last one filled up with rows of weight 0, their weights, and whether it is the first."""
        rows = self.rows.slice(start, start + self._chunk)
        count = _count(rows)
        weights = np.where(np.arange(self._chunk) < count, self.rows.weight, 0.0).astype(self._dtype)
        if count < self._chunk:
            fill = np.minimum(np.arange(self._chunk), count - 1)
            rows = jax.tree.map(lambda array: array[fill], rows)
        shared = share_rows(self.mesh, jax.tree.map(jnp.asarray, (rows, weights)))
        return *shared, copy_to_all(self.mesh, jnp.asarray(start == 0))

    def _compiled(self, name, function, size) -> Callable:
        """The program of a chunk; arrays that the log-likelihood refers to are arguments of it."""
        if name not in self._programs:
            rows, weights, is_first = self._padded(0)
            prior, likelihood = self.rows.log_prior, self.rows.log_likelihood
            point = jax.ShapeDtypeStruct((self.rows.dim,), self._dtype)
            traced = jax.make_jaxpr(lambda z, rows: (prior(z), likelihood(z, rows)))(point, rows)
            arrays = copy_to_all(self.mesh, [jnp.asarray(array) for array in traced.consts])

            def run(arrays, points, rows, weights, is_first):
                parts = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, arrays))

                def total(z):
                    log_prior, values = parts(z, *jax.tree.leaves(rows))
                    return jnp.where(is_first, log_prior, 0.0) + jnp.sum(jnp.where(weights > 0, weights * values, 0.0))

                return on_all(self.mesh, function(total, points))

            block = copy_to_all(self.mesh, np.zeros((size, self.rows.dim), self._dtype))
            compiled = compile_once(run, arrays, block, rows, weights, is_first, mesh=self.mesh)
            self._programs[name] = lambda *arguments: wait_for(self.mesh, compiled(arrays, *arguments))
        return self._programs[name]


def _values(total, z):
    return (jax.vmap(total)(z),)


def _gradients(total, z):
    return jax.vmap(jax.value_and_grad(total))(z)


def _hessian(total, z):
    """The Hessian at one point, some directions at a time."""
    dim = z.shape[1]

    def product(direction):
        return jax.jvp(jax.grad(total), (z[0],), (direction,))[1]

    return (lax.map(product, jnp.eye(dim, dtype=z.dtype), batch_size=_DIRECTIONS)[None],)


def _count(data: PyTree) -> int:
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise ValueError(f"Expected rows: arrays with one common number of rows, at least 1; got {sorted(lengths)}.")
    return int(next(iter(lengths))[0])


def _native(array: np.ndarray) -> np.ndarray:
    """Double precision as JAX would take it, so that chunks of files and of memory compile to the same program."""
    return array.astype(jnp.result_type(float)) if array.dtype.kind == "f" else array
