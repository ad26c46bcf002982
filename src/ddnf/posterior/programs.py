"""The compiled programs of a log density: values, gradients and curvature, with its data as arguments.

Arrays that a log density closes over, such as the rows of a table, would become constants of every program that
contains it. Such programs are large, compile slowly, and compile again for each new table. Instead, the log density is
traced once, its arrays are extracted, and each program takes them as arguments. Programs are cached by their text, so
models of the same form and shape share them, whatever their data.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, partial
from threading import Lock
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree

from ddnf.posterior.cost import largest, operations, shapes
from ddnf.training.devices import copy_to_all, on_all, share_rows, shared_map, wait_for

# Points per call, for values and for gradients, so that one program serves any number of points.
_VALUES = 500
_GRADIENTS = 32
_KEPT = 64
# Random signs by which the diagonal of a Hessian is estimated.
_SIGNS = 32
# Values that a product with the Hessian takes as long as, and operations beyond which a Hessian takes seconds.
_HESSIAN = 4
_MOST_OPERATIONS = 1e11
# Elements of an intermediate result times points that are computed at once: more would not fit into memory.
LARGEST = 2**24
# Size of a matrix above which linear algebra benefits from several threads.
_LARGE = 200


class Density(eqx.Module):
    """A traced log density; its arrays are leaves of this pytree, so compiled functions take them as arguments."""

    jaxpr: Any = eqx.field(static=True)
    arrays: list[Any]

    def __call__(self, z: Float[Array, " dim"]) -> Float[Array, ""]:
        return jaxpr_as_fun(ClosedJaxpr(self.jaxpr, self.arrays))(z)[0]


class Programs:
    """Values, gradients and Hessians of a log density at NumPy or JAX points; the devices of a mesh share the points.

    Example:
        >>> programs = Programs(lambda z: -jnp.sum(z**2) / 2, 2)
        >>> programs.values(np.ones((3, 2))).tolist()
        [-1.0, -1.0, -1.0]
        >>> programs.gradient(np.ones(2))[1].tolist(), programs.hessian(np.ones(2)).tolist()
        ([-1.0, -1.0], [[-1.0, -0.0], [-0.0, -1.0]])
    """

    def __init__(self, log_density: Callable[[Array], Array], dim: int, mesh: Mesh | None = None):
        self._dtype = jnp.result_type(float)
        traced = jax.make_jaxpr(log_density)(jax.ShapeDtypeStruct((dim,), self._dtype))
        self.mesh, arrays = mesh, [jnp.asarray(array) for array in traced.consts]
        self.density = Density(traced.jaxpr, copy_to_all(mesh, arrays))
        self._programs: dict[str, Callable] = {}

    @property
    def has_large_matrices(self) -> bool:
        """Whether the log density computes matrices of more than a few hundred rows and columns."""
        return any(len(shape) >= 2 and min(shape[-2:]) > _LARGE for shape in shapes(self.density.jaxpr))

    def values(self, z: Float[Array | np.ndarray, "n dim"]) -> Float[np.ndarray, " n"]:
        """The log density at many points."""
        size = self._size(_VALUES)
        return in_parts(self._program("values", _values, (size,)), self._points(z), size)[0]

    def gradients(
        self, z: Float[Array | np.ndarray, "n dim"]
    ) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, "n dim"]]:
        """The log density and its gradient at many points."""
        size = self._size(_GRADIENTS)
        values, gradients = in_parts(self.batch_gradients(size), self._points(z), size)
        return values, gradients

    def batch_gradients(self, size: int) -> Callable[[Array], tuple[Array, Array]]:
        """The compiled function from `size` points to values and gradients there, without leaving the device."""
        return self._program(f"gradients {size}", _gradients, (size,))

    def gradient(self, z: Float[np.ndarray, " dim"]) -> tuple[float, Float[np.ndarray, " dim"]]:
        """The log density and its gradient at one point."""
        value, gradient = self._program("gradient", _gradient, ())(self._points(z))
        return float(value), np.asarray(gradient, float)

    def hessian(self, z: Float[np.ndarray, " dim"]) -> Float[np.ndarray, "dim dim"]:
        """The Hessian; only its diagonal, estimated, where all of it would take long."""
        if self._is_hessian_cheap:
            return np.asarray(self._program("hessian", _hessian, ())(self._points(z)), float)
        return np.diag(np.asarray(self._program("diagonal", _diagonal_hessian, ())(self._points(z)), float))

    @cached_property
    def _is_hessian_cheap(self) -> bool:
        (dim,) = self.density.jaxpr.invars[0].aval.shape
        return _HESSIAN * dim * operations(self.density, dim) < _MOST_OPERATIONS

    def _points(self, z) -> np.ndarray:
        # NumPy arrays enter compiled functions in half the time that JAX's own conversion takes.
        return np.asarray(z, self._dtype)

    def _size(self, least: int) -> int:
        """A number of points that the devices can share evenly."""
        devices = 1 if self.mesh is None else self.mesh.size
        return -(-least // devices) * devices

    def _program(self, name: str, function: Callable, batch: tuple[int, ...]) -> Callable:
        if name not in self._programs:
            jaxpr, arrays, mesh = self.density.jaxpr, self.density.arrays, self.mesh
            (dim,) = jaxpr.invars[0].aval.shape
            place = partial(share_rows if batch else copy_to_all, mesh)
            most = max(1, LARGEST // largest(jaxpr))

            def run(arrays, z):
                return on_all(mesh, function(Density(jaxpr, arrays), z, most, mesh))

            compiled = compile_once(run, arrays, place(np.zeros((*batch, dim), self._dtype)), mesh=mesh)
            self._programs[name] = lambda z: wait_for(mesh, compiled(arrays, place(z)))
        return self._programs[name]


def compile_map(function: Callable, points: PyTree) -> Callable[[PyTree], PyTree]:
    """The compiled function that maps a function over the first axis of some points, for points of these shapes.

    Example:
        >>> compile_map(lambda z: dict(scale=jnp.exp(z)), jnp.zeros(3))(jnp.zeros(3))["scale"].tolist()
        [1.0, 1.0, 1.0]
    """
    traced, shapes = jax.make_jaxpr(jax.vmap(function), return_shape=True)(points)
    arrays, structure = [jnp.asarray(array) for array in traced.consts], jax.tree.structure(shapes)

    def run(arrays, points):
        return jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, arrays))(*jax.tree.leaves(points))

    compiled = compile_once(run, arrays, points)
    return lambda points: jax.tree.unflatten(structure, compiled(arrays, points))


def _values(density, z, most, mesh):
    return (shared_map(mesh, lambda density, z: _map(density, z, most), density, z),)


def _gradients(density, z, most, mesh):
    return shared_map(mesh, lambda density, z: _map(jax.value_and_grad(density), z, most), density, z)


def _map(function, z, most):
    return jax.vmap(function)(z) if most >= len(z) else lax.map(function, z, batch_size=most)


def _gradient(density, z, *_):
    return jax.value_and_grad(density)(z)


def _hessian(density, z, most, _):
    return _map(lambda direction: _along(density, z, direction), jnp.eye(len(z), dtype=z.dtype), most)


def _diagonal_hessian(density, z, most, _):
    """The diagonal of the Hessian by its products with random signs (Bekas, Kokiopoulou and Saad, 2007)."""
    signs = jr.rademacher(jr.key(0), (_SIGNS, len(z)), z.dtype)
    products = _map(lambda direction: _along(density, z, direction), signs, most)
    return jnp.mean(signs * products, axis=0)


def _along(density, z, direction):
    """The product of the Hessian with a direction."""
    return jax.jvp(jax.grad(density), (z,), (direction,))[1]


_PROGRAMS: OrderedDict[bytes, Callable] = OrderedDict()
_LOCK = Lock()


def compile_once(function: Callable, *arguments, mesh: Mesh | None = None) -> Callable:
    """A compiled function; the same one for all functions that are lowered to the same text, for the same devices."""
    lowered = jax.jit(function, keep_unused=True).lower(*arguments)
    devices = "" if mesh is None else str([device.id for device in mesh.devices.flat])
    name = hashlib.sha256((lowered.as_text() + devices).encode()).digest()
    with _LOCK:
        if name in _PROGRAMS:
            _PROGRAMS.move_to_end(name)
            return _PROGRAMS[name]
    compiled = lowered.compile()
    with _LOCK:
        _PROGRAMS[name] = compiled
        while len(_PROGRAMS) > _KEPT:
            _PROGRAMS.popitem(last=False)
    return compiled


def in_parts(program: Callable, points: np.ndarray, size: int) -> list[np.ndarray]:
    """The outputs of a program for a fixed number of points at any number of them."""
    parts = []
    for first in range(0, max(len(points), 1), size):
        part = points[first : first + size]
        filled = np.concatenate([part, np.zeros((size - len(part), *part.shape[1:]), part.dtype)])
        filled[len(part) :] = part[-1:] if len(part) else 0.0
        parts.append([np.asarray(output, float)[: len(part)] for output in program(filled)])
    return [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]
