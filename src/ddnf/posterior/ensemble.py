"""Many log densities with the same program and different arrays, such as one model for many data sets of one shape.

Their arrays are stacked, and each compiled function maps over the stack (`jax.vmap`), one group of densities at a time.
All groups have the same size, so that nothing is compiled twice.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from ddnf.posterior.programs import LARGEST, Density
from ddnf.posterior.target import Target

# Maximum distance from a mode at which a climb may end, in standard deviations.
_PRECISE = 1e-2
# Programs by their text, so that ensembles of the same form share compiled functions.
_KNOWN: dict[bytes, Any] = {}


class Climbed(eqx.Module):
    """End points of climbs: points, log densities, whether the gradient vanishes, and the triangular scales of the
    Gaussians with the local curvature."""

    z: Float[np.ndarray, "sets starts dim"]
    value: Float[np.ndarray, "sets starts"]
    is_mode: np.ndarray
    scale: Float[np.ndarray, "sets starts dim dim"]

    @property
    def log_mass(self) -> Float[np.ndarray, "sets starts"]:
        """The integral of the Gaussian of the curvature; -inf where there is no mode."""
        dim = self.z.shape[-1]
        diagonal = np.diagonal(self.scale, axis1=-2, axis2=-1)
        mass = self.value + np.sum(np.log(diagonal), axis=-1) + dim / 2 * np.log(2 * np.pi)
        return np.where(self.is_mode, mass, -np.inf)


class Ensemble:
    """Values and curvature of many log densities, a group of them in each call.

    Example:
        >>> targets = [Target(lambda z, y=jnp.full(3, y): -jnp.sum((z - y) ** 2) / 2, 1) for y in (1.0, 2.0)]
        >>> ensemble = Ensemble(targets)
        >>> ensemble.values(ensemble.group(np.array([0, 1])), np.zeros((2, 1, 1))).tolist()
        [[-1.5], [-6.0]]
    """

    def __init__(self, targets: Sequence[Target]):
        self.dim = targets[0].dim
        densities = [target.programs.density for target in targets]
        names = [_name(density, target.dim) for density, target in zip(densities, targets, strict=True)]
        strange = next((number for number, name in enumerate(names) if name != names[0]), None)
        if strange is not None:
            raise ValueError(
                f"Expected targets of one model with data of one shape; target {strange} differs from the first. Data "
                "must be arrays, because numbers become part of the program."
            )
        self._jaxpr = _KNOWN.setdefault(names[0], densities[0].jaxpr)
        self._arrays = [
            np.stack(arrays) for arrays in zip(*(map(np.asarray, d.arrays) for d in densities), strict=True)
        ]
        largest = max((max(array.shape[1:], default=1) for array in self._arrays), default=1)
        self._points = max(1, LARGEST // largest)

    def group(self, numbers: Int[np.ndarray, " sets"]) -> Density:
        """Some of the densities, stacked along a new axis of their arrays."""
        return Density(self._jaxpr, [jnp.asarray(array[numbers]) for array in self._arrays])

    def values(self, group: Density, z: Float[np.ndarray, "sets n dim"]) -> Float[np.ndarray, "sets n"]:
        """The log densities, each at its own points."""
        return np.asarray(_values(group, _points(z), self._at_once(z)), float)

    def curvature(
        self, group: Density, z: Float[np.ndarray, "sets n dim"]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values, gradients and Hessians."""
        most = max(1, self._at_once(z) // self.dim)
        return tuple(np.asarray(array, float) for array in _curvature(group, _points(z), most))  # pyright: ignore[reportReturnType]

    def climb(self, group: Density, start: Float[np.ndarray, "sets n dim"], steps: int = 60) -> Climbed:
        """Climbs to modes by damped Newton steps; directions that curve upwards enter by their absolute curvature."""
        z, found = start, self.curvature(group, start)
        damping = np.full(z.shape[:2], 0.1)
        for _ in range(steps):
            step, slope = _newton(found, damping)
            is_done = (slope < _PRECISE) | np.isinf(slope) | (damping > 1e6)
            if is_done.all():
                break
            new = np.where(is_done[..., None], z, z + step)
            there = self.curvature(group, new)
            is_known = np.all([np.isfinite(a).reshape(*z.shape[:2], -1).all(axis=-1) for a in there], axis=0)
            is_better = is_known & ~is_done & ~(there[0] < found[0])
            z = np.where(is_better[..., None], new, z)
            found = tuple(_choose(is_better, a, b) for a, b in zip(there, found, strict=True))
            damping = np.where(is_better, damping / 6, damping * 6)
        _, slope = _newton(found, np.zeros(z.shape[:2]))
        return Climbed(z, found[0], (slope < 0.3) & _bends_down(found[2]), _scales(found[2]))

    def _at_once(self, z) -> int:
        """How many densities are computed at once: intermediate results of more would not fit into memory."""
        return int(max(1, min(len(z), self._points // z.shape[1])))


@eqx.filter_jit
def _values(group: Density, z: Array | np.ndarray, most: int) -> Array:
    return _over(lambda density, z: jax.vmap(density)(z), group, z, most)


@eqx.filter_jit
def _curvature(group: Density, z: Array | np.ndarray, most: int) -> PyTree:
    def one(density, z):
        return *jax.value_and_grad(density)(z), jax.hessian(density)(z)

    return _over(lambda density, z: jax.vmap(lambda z: one(density, z))(z), group, z, most)


def _over(function, group, z, most):
    return lax.map(lambda both: function(*both), (group, z), batch_size=most)


def _points(z) -> np.ndarray:
    return np.asarray(z, jnp.result_type(float))


def _name(density: Density, dim: int) -> bytes:
    """A key that identifies the program of a density."""
    point = jax.ShapeDtypeStruct((dim,), jnp.result_type(float))
    arrays = density.arrays
    lowered = jax.jit(lambda arrays, z: Density(density.jaxpr, arrays)(z), keep_unused=True).lower(arrays, point)
    return hashlib.sha256(lowered.as_text().encode()).digest()


def _choose(is_new, new, old):
    return np.where(is_new.reshape(*is_new.shape, *[1] * (new.ndim - 2)), new, old)


def _eigen(hessian):
    """Scales of the coordinates, and eigenvalues and vectors of the negative Hessian in these."""
    diagonal = np.abs(np.diagonal(hessian, axis1=-2, axis2=-1))
    is_known = np.isfinite(hessian).all(axis=(-2, -1), keepdims=True)
    size = np.where(is_known[..., 0], np.sqrt(np.maximum(diagonal, 1e-30)), 1.0)
    precision = np.where(is_known, -hessian, np.eye(hessian.shape[-1]))
    bend, vectors = np.linalg.eigh(precision / (size[..., :, None] * size[..., None, :]))
    bend = np.maximum(np.abs(bend), np.maximum(1e-8 * np.abs(bend).max(axis=-1, keepdims=True), 1e-30))
    return size, bend, vectors


def _bends_down(hessian):
    """Whether the density curves downwards in all directions: not at a saddle."""
    size, _, _ = _eigen(hessian)
    scaled = np.nan_to_num(-hessian) / (size[..., :, None] * size[..., None, :])
    return np.linalg.eigvalsh(scaled).min(axis=-1) > -1e-3


def _newton(found, damping):
    """Steps, and the length of the gradient as measured by the curvature; infinite where something is not finite."""
    value, gradient, hessian = found
    is_known = np.isfinite(value) & np.isfinite(gradient).all(axis=-1) & np.isfinite(hessian).all(axis=(-2, -1))
    size, bend, vectors = _eigen(hessian)
    slope = np.einsum("...ij,...i->...j", vectors, np.where(is_known[..., None], gradient, 0.0) / size)
    step = np.einsum("...ij,...j->...i", vectors, slope / (bend + damping[..., None])) / size
    length = np.sqrt(np.sum(slope**2 / bend, axis=-1))
    return step, np.where(is_known, length, np.inf)


def _scales(hessian):
    """Triangular roots of the inverse of |-hessian|."""
    size, bend, vectors = _eigen(hessian)
    root = vectors / np.sqrt(bend)[..., None, :] / size[..., :, None]
    # The triangle comes from a QR of root^T, which needs no squares.
    triangle = np.swapaxes(np.linalg.qr(np.swapaxes(root, -1, -2), mode="r"), -1, -2)
    return triangle * np.sign(np.diagonal(triangle, axis1=-2, axis2=-1))[..., None, :]
