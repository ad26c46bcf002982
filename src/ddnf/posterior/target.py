"""The density that a posterior is fitted to."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.random import generator
from ddnf.posterior.programs import Programs, compile_map
from ddnf.posterior.rows import RowPrograms, Rows, rows_from
from ddnf.posterior.sites import Site


class Details(NamedTuple):
    """What a probabilistic program provides beyond its density, for ArviZ.

    Attributes:
        dims: names of the axes of each parameter and observation.
        coords: labels along these axes.
        observed: the data by name.
        log_likelihood: from one unconstrained point to the log-likelihood of each observation, by name.
        predict: from a random key and named draws (n, ...) to predicted data (n, ...), by name.
    """

    dims: dict[str, list[str]]
    coords: dict[str, Any]
    observed: dict[str, np.ndarray]
    log_likelihood: Callable[[Array], dict[str, Array]]
    predict: Callable[[PRNGKeyArray, dict[str, Any]], dict[str, Any]]


class _Cache(dict):
    """Compiled programs of one target: hashed by identity, and left behind when the target is copied or pickled."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other):
        return self is other

    def __reduce__(self):
        return _Cache, ()


class Target(eqx.Module):
    """A density on R^dim, known up to a constant factor.

    Args:
        log_density: function of one point of shape (dim,) that JAX can trace and differentiate.
        dim: dimension.
        constrain: maps a point to the form that draws are returned in, such as a dict of constrained parameters; None
            for the point itself.
        initial: maps a random key to a start of the search for modes; None for uniform on [-2, 2]^dim.
        unconstrain: the inverse of `constrain`, for `Posterior.log_prob` of named draws; None if there is none.
        sites: returns a description of `constrain` by standard transforms, stored with a saved posterior.
        details: returns other information about a model: names of axes, data, their likelihood and predictions.
        rows: data with many rows: a pytree of arrays with a common leading axis. `log_density` is then the log prior
            alone. Modes, curvature and the final check of a fit use all rows, in chunks; training uses as many rows as
            it needs (see the guide on scaling). NumPy memory maps stay on disk. So do Parquet files: pass a path, a
            folder or a PyArrow dataset, and each row is a dict of the columns.
        log_likelihood: function of a point and one row that returns the log density of the row; only with `rows`.

    Example:
        >>> import jax.numpy as jnp
        >>> target = Target(lambda z: -jnp.sum(z**2) / 2, 3)
        >>> target.dim
        3
        >>> y = np.random.default_rng(0).normal(size=100_000)
        >>> prior = lambda z: -jnp.sum(z**2) / 2
        >>> tall = Target(prior, 1, rows=y, log_likelihood=lambda z, y: -((y - z[0]) ** 2) / 2)
        >>> tall.rows.count
        100000
    """

    log_density: Callable[[Array], Array]
    dim: int = eqx.field(static=True)
    constrain: Callable[[Array], Any] | None
    initial: Callable[[PRNGKeyArray], Array] | None
    unconstrain: Callable[[Any], Array] | None
    sites: Callable[[], tuple[Site, ...]] | None
    details: Callable[[], Details] | None
    rows: Rows | None = eqx.field(static=True, repr=False)
    mesh: Mesh | None = eqx.field(static=True, repr=False)
    _programs: _Cache = eqx.field(static=True, repr=False)

    def __init__(
        self,
        log_density: Callable,
        dim: int,
        *,
        constrain: Callable | None = None,
        initial: Callable | None = None,
        unconstrain: Callable | None = None,
        sites: Callable[[], tuple[Site, ...]] | None = None,
        details: Callable[[], Details] | None = None,
        rows: Any = None,
        log_likelihood: Callable | None = None,
    ):
        if not callable(log_density):
            raise ValueError(f"Expected log_density to be a function; got {log_density!r}.")
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise ValueError(f"Expected dim to be an integer of at least 1; got {dim!r}.")
        self.rows = rows_from(log_density, log_likelihood, rows, dim)
        self.log_density, self.dim = log_density if self.rows is None else self.rows.log_density, dim
        self.constrain, self.initial = constrain, initial
        self.unconstrain, self.sites, self.details = unconstrain, sites, details
        self._programs, self.mesh = _Cache(), None
        self._check()

    @property
    def programs(self) -> Programs:
        """Compiled values, gradients and Hessians of the log density in JAX's current precision."""
        dtype = jnp.result_type(float)
        name = dtype, self.mesh
        if name not in self._programs:
            self._programs[name] = (
                Programs(self.log_density, self.dim, self.mesh)
                if self.rows is None
                else RowPrograms(self.rows, mesh=self.mesh)
            )
        return self._programs[name]

    def on(self, mesh: Mesh | None) -> "Target":
        """The same target, computed on the devices of a mesh."""
        other = copy.copy(self)
        object.__setattr__(other, "mesh", mesh)
        return other

    def map(self, name: str, points: Any) -> Any:
        """`constrain` or `unconstrain`, by its name, of many points: compiled once for each number of them."""
        function, points = getattr(self, name), jax.tree.map(jnp.asarray, points)
        shapes = name, *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(points)), jax.tree.structure(points)
        if shapes not in self._programs:
            self._programs[shapes] = compile_map(function, points)
        return self._programs[shapes](points)

    def start(self, key: PRNGKeyArray) -> Float[np.ndarray, " dim"]:
        """A random point to begin a search from."""
        if self.initial is None:
            return generator(key).uniform(-2.0, 2.0, self.dim)
        return np.asarray(self.initial(key), float).reshape(self.dim)

    def _check(self):
        point = jax.ShapeDtypeStruct((self.dim,), jnp.result_type(float))
        try:
            value = jax.eval_shape(self.log_density if self.rows is None else self.rows.log_prior, point)
        except Exception as error:
            first = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(
                f"Expected a log_density that JAX can trace at a point of shape ({self.dim},); "
                f"it raised {type(error).__name__}: {first[0]}"
            ) from error
        if getattr(value, "shape", None) != ():
            raise ValueError(f"Expected log_density to return a scalar; got {getattr(value, 'shape', type(value))}.")
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"Expected log_density to return a floating-point number; got {value.dtype}.")
