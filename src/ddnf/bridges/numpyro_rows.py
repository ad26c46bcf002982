"""Plates of NumPyro models as rows: the log-likelihood of some of them, and the log prior.

A plate with a `subsample_size` receives the row numbers. For a plate without one, the arguments of the model that have
one row per member are sliced.
"""

from collections.abc import Callable
from threading import RLock
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ddnf.posterior.programs import Programs
from ddnf.posterior.rows import CHUNK, RowPrograms, Rows
from ddnf.posterior.tall import SMALLEST
from ddnf.system.optional import require

numpyro = require("numpyro", "numpyro")
handlers, util = numpyro.handlers, numpyro.infer.util

# NumPyro traces models with global state: one thread at a time.
TRACING = RLock()


class Plate(NamedTuple):
    """A plate whose members are rows.

    Attributes:
        name: of the plate.
        size: number of its members.
        batch: number of rows that the user requested; None without a request.
        is_cut: whether the arguments are sliced; otherwise the plate receives the row numbers.
    """

    name: str
    size: int
    batch: int | None
    is_cut: bool


class Members(numpyro.primitives.Messenger):
    """Replaces the members of a plate by these."""

    def __init__(self, fn: Callable, name: str, members: Any):
        super().__init__(fn)
        self._plate, self._members = name, members

    def process_message(self, msg):
        if msg["type"] == "plate" and msg["name"] == self._plate:
            msg["args"] = (msg["args"][0], len(self._members))
            msg["value"] = self._members


def with_all_members(model: Callable, plate: Plate) -> Callable:
    """The model without a subsample."""
    return model if plate.is_cut else Members(model, plate.name, jnp.arange(plate.size))


def find_plate(
    trace: dict[str, Any], batch: int | dict[str, int] | None, *, is_enumerated: bool = False
) -> Plate | None:
    """The plate whose members are rows: one with a subsample, or the one that `batch` names, or a large one.

    Raises if the requested plate does not exist.
    """
    sizes = {name: site["args"] for name, site in trace.items() if site["type"] == "plate"}
    observed = [site for site in trace.values() if site["type"] == "sample" and site["is_observed"]]
    named = {frame.name for site in observed for frame in site["cond_indep_stack"]}
    asked = {name: part for name, (size, part) in sizes.items() if part not in (None, size)}
    if isinstance(batch, dict):
        asked |= batch
    elif batch is not None and not asked:
        asked = {max(named, key=lambda name: sizes[name][0]): batch} if named else {}
        if not asked:
            raise ValueError("Expected a plate around observed sites for batch; got none.")
    if unknown := [name for name in asked if name not in named]:
        got = "a plate without one" if unknown[0] in sizes else "no plate of that name"
        raise ValueError(f"Expected observed sites in the subsampled plate {unknown[0]!r}; got {got}.")
    if len(asked) > 1:
        raise ValueError(f"Expected a subsample in one plate; got {', '.join(sorted(asked))}.")
    if is_enumerated and asked:
        raise ValueError(f"Expected a model without discrete sites to subsample; got a subsample in {min(asked)}.")
    if not asked:
        if is_enumerated:
            return None
        large = [name for name in named if sizes[name][0] >= SMALLEST]
        is_local = len(large) == 1 and any(_is_parameter_in(site, large[0]) for site in trace.values())
        return Plate(large[0], sizes[large[0]][0], None, True) if len(large) == 1 and not is_local else None
    ((name, part),) = asked.items()
    size = sizes[name][0]
    if isinstance(part, bool) or not isinstance(part, int) or not 1 <= part <= size:
        raise ValueError(f"Expected a batch from 1 to {size} for the plate {name!r}; got {part!r}.")
    _check_outside(trace, name)
    return Plate(name, size, part, sizes[name][1] in (None, size))


def _check_outside(trace, name):
    if inside := [site["name"] for site in trace.values() if _is_parameter_in(site, name)]:
        raise ValueError(
            f"Expected all parameters outside the subsampled plate {name!r}; got {inside[0]!r} inside, one per row. "
            "Sum it out, or drop the subsample."
        )


def _is_parameter_in(site, name) -> bool:
    return site["type"] == "sample" and not site["is_observed"] and _frame(site, name) is not None


def _frame(site, name):
    return next((frame for frame in site.get("cond_indep_stack") or () if frame.name == name), None)


class PlateRows(NamedTuple):
    """A model with a plate whose members can be chosen, its arguments, and the names of a point's coordinates."""

    model: Callable
    plate: Plate
    args: tuple
    kwargs: dict[str, Any]
    unravel: Callable

    def with_members(self, rows: Any) -> tuple[Callable, tuple, dict[str, Any]]:
        """The model with some members of the plate, and its arguments."""
        model, plate = handlers.seed(self.model, jr.key(0)), self.plate
        if not plate.is_cut:
            return Members(model, plate.name, jnp.asarray(rows)), self.args, self.kwargs
        leaves, structure = jax.tree.flatten((self.args, self.kwargs))
        rest = iter(rows)
        cut = [next(rest) if _has_rows(leaf, plate.size) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(structure, cut)
        return Members(model, plate.name, jnp.arange(len(rows[0]))), args, kwargs

    @property
    def data(self) -> Any:
        """What is cut: numbers of rows, or arguments."""
        if not self.plate.is_cut:
            return np.arange(self.plate.size, dtype=np.int32)
        leaves = [a for a in jax.tree.leaves((self.args, self.kwargs)) if _has_rows(a, self.plate.size)]
        if not leaves:
            raise ValueError(
                f"Expected arguments of the model with {self.plate.size} rows, one per member of the plate "
                f"{self.plate.name!r}; got none. Pass the data as arguments, or use subsample_size in the plate."
            )
        return leaves

    def is_likelihood(self, site) -> bool:
        return site["type"] == "sample" and site["is_observed"] and _frame(site, self.plate.name) is not None

    def rows(self, dim: int, log_density: Callable | None) -> Rows | None:
        """The rows, checked against the density of the model; None if they differ and the user did not request rows."""
        try:
            rows = Rows(self.log_prior, self.log_likelihood, self.data, dim, self.plate.batch)
            if log_density is not None:
                self._check_prior(dim)
                _compare(rows, log_density)
        except ValueError:
            if self.plate.batch is None:
                return None
            raise
        return rows

    def _check_prior(self, dim: int) -> None:
        """Raises if the model uses the rows outside of the plate, as in a prior around their mean."""
        z = jnp.asarray(_points(dim)[0])
        chosen = np.unique(np.linspace(0, self.plate.size - 1, 5).astype(int))
        values = [float(self.log_prior(z, int(row))) for row in chosen]
        if not np.allclose(values, values[0], rtol=1e-5, equal_nan=True):
            raise ValueError(
                f"Expected a model that uses the rows of {self.plate.name!r} inside of the plate only; got one whose "
                "prior depends on them. Compute what it needs before, and pass it as a scalar."
            )

    def log_prior(self, z: Any, row: int = 0) -> Any:
        """The log density of what is outside of the plate. The model runs with one row, and any row will do."""
        with TRACING:
            model, args, kwargs = self._single(row)
            hidden = handlers.block(model, hide_fn=self.is_likelihood)
            return -util.potential_energy(hidden, args, kwargs, self.unravel(z))

    def log_likelihood(self, z: Any, rows: Any) -> Any:
        """The log-likelihood of each of some rows."""
        with TRACING:
            known = util.constrain_fn(*self._single(), self.unravel(z))
            model, args, kwargs = self.with_members(rows)
            trace = handlers.trace(handlers.substitute(model, data=known)).get_trace(*args, **kwargs)
        size, count = trace[self.plate.name]["args"]
        sites = (site for site in trace.values() if self.is_likelihood(site))
        return sum(_by_row(site, self.plate.name, count) * (count / size) for site in sites)

    def constrain(self, z: Any) -> dict[str, Any]:
        """Parameters by name, and deterministic sites outside of the plate."""
        with TRACING:
            model, args, kwargs = self._single()
            hidden = handlers.block(model, hide_fn=lambda site: _is_deterministic_in(site, self.plate.name))
            return util.constrain_fn(hidden, args, kwargs, self.unravel(z), return_deterministic=True)

    def _single(self, row: int = 0) -> tuple[Callable, tuple, dict[str, Any]]:
        """The model with one row."""
        return self.with_members(jax.tree.map(lambda array: jnp.asarray(array[row : row + 1]), self.data))


def _is_deterministic_in(site, name) -> bool:
    return site["type"] == "deterministic" and _frame(site, name) is not None


def _by_row(site, name, count):
    """The log density of a site for each member of a plate."""
    value = site["fn"].log_prob(site["value"])
    value = value if site["scale"] is None else value * site["scale"]
    frame = _frame(site, name)
    assert frame is not None
    axis = value.ndim + frame.dim
    if value.shape[axis] != count:
        raise ValueError(f"Expected a value of {site['name']!r} for each row of {name!r}; got shape {value.shape}.")
    return jnp.moveaxis(value, axis, 0).reshape(count, -1).sum(axis=1)


def _has_rows(leaf, size) -> bool:
    return isinstance(leaf, np.ndarray | jax.Array) and leaf.shape[:1] == (size,)


def _compare(rows: Rows, log_density: Callable) -> None:
    """Raises unless the rows and the prior make up the density of the model, at two points."""
    points = _points(rows.dim)
    halves = RowPrograms(rows, min(CHUNK, -(-rows.count // 2)))
    whole = Programs(log_density, rows.dim).density
    found, wanted = halves.values(points), np.array([float(eqx.filter_jit(whole)(z)) for z in points])
    tolerance = 1e-4 if jnp.result_type(float) == jnp.float32 else 1e-8
    if not np.allclose(found, wanted, rtol=tolerance, equal_nan=True):
        raise ValueError(
            "Expected a plate whose members are independent rows of the arguments; got a different density with sliced "
            f"arguments: {found[0]:.6g} instead of {wanted[0]:.6g}. Use subsample_size in the plate, or drop batch."
        )


def _points(dim: int) -> np.ndarray:
    """Two points at which densities are compared."""
    return np.random.default_rng(0).uniform(-0.5, 0.5, (2, dim)).astype(jnp.result_type(float))
