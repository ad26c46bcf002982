"""Gaussians at the modes of a target: the best on the path to each, as in Pathfinder, with the target's curvature."""

from typing import NamedTuple

import jax.random as jr
import numpy as np
from jaxtyping import Float, PRNGKeyArray
from scipy import linalg, optimize

from ddnf.flow.random import generator
from ddnf.posterior.curvature import Derivatives
from ddnf.posterior.proper import IMPROPER
from ddnf.posterior.target import Target

# Beyond this many dimensions, covariances are diagonal.
LARGEST_FULL = 2048
_DRAWS = 24
_POINTS = 6
# Searches for further modes if there are several: maximum number, and unsuccessful searches before the end (minimum,
# and per known mode).
_MOST_SEARCHES = 200
_IDLE_SEARCHES = 30, 6


class Gaussian(NamedTuple):
    """A Gaussian with its ELBO, and the mode at the end of the path that it was found on."""

    mean: Float[np.ndarray, " dim"]
    scale: Float[np.ndarray, "dim dim"]
    elbo: float
    mode: Float[np.ndarray, " dim"]


class Search:
    """Searches for modes of a target with L-BFGS, and for Gaussians along the paths to them."""

    def __init__(self, target: Target):
        self.target = target
        self._derivatives = Derivatives(target.programs)
        self._modes: dict[bytes, np.ndarray | None] = {}

    @property
    def gradients(self) -> int:
        """Number of gradient evaluations so far."""
        return self._derivatives.count

    def value(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        return self._derivatives.value_and_gradient(z)

    def is_finite(self, z: np.ndarray) -> bool:
        value, gradient = self.value(z)
        return bool(np.isfinite(value) and np.isfinite(gradient).all())

    def climb(self, start: np.ndarray) -> np.ndarray:
        """The points of the path from `start` to a mode."""

        def negative(z):
            value, gradient = self.value(z)
            # A large value where the density is zero makes the line search turn back.
            return (
                (-value, -gradient)
                if np.isfinite(value) and np.isfinite(gradient).all()
                else (1e25, np.zeros_like(gradient))
            )

        path = [np.asarray(start, float)]
        optimize.minimize(
            negative,
            path[0],
            jac=True,
            method="L-BFGS-B",
            callback=lambda z: path.append(np.array(z)),
            options=dict(maxiter=1000, maxfun=2000, maxcor=20),
        )
        return np.stack([*path, self._newton(path[-1])])

    def mode_from(self, start: np.ndarray) -> np.ndarray | None:
        """The mode that a climb from `start` reaches, or None; caches the result for each start."""
        name = np.asarray(start, float).tobytes()
        if name not in self._modes:
            mode = self.climb(start)[-1] if self.is_finite(start) else None
            self._modes[name] = mode if mode is not None and self.is_mode(mode) else None
        return self._modes[name]

    def _newton(self, z: np.ndarray) -> np.ndarray:
        """A few Newton steps: L-BFGS stops early where the parameters have very different scales."""
        value, gradient = self.value(z)
        for _ in range(20):
            hessian = self._derivatives.hessian(z)
            if hessian is None:
                break
            scale, _ = _factor(-hessian)
            slope = scale.T @ gradient
            steps = (z + damping * (scale @ slope) for damping in (1.0, 0.5, 0.1, 0.01))
            better = next((new for new in steps if self.value(new)[0] > value), None)
            if better is None:
                break
            z, (value, gradient) = better, self.value(better)
            if np.linalg.norm(slope) < 1e-2:
                break
        return z

    def is_mode(self, z: np.ndarray) -> bool:
        """Whether the gradient vanishes, measured by the curvature: not where a search got stuck."""
        hessian = self._derivatives.hessian(z)
        if hessian is None:
            return False
        return bool(np.linalg.norm(_factor(-hessian)[0].T @ self.value(z)[1]) < 0.3)

    def laplace(self, mode: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Mean and triangular scale of the Gaussian with the target's curvature at a mode."""
        hessian = self._derivatives.hessian(mode)
        return None if hessian is None else (mode, _factor(-hessian)[0])

    def gaussian(self, key: PRNGKeyArray, start: np.ndarray) -> Gaussian | None:
        """The Gaussian of highest ELBO on the path from `start` to a mode; None if no ELBO is finite."""
        path = self.climb(start)
        # The best Gaussian is usually at the end of the path; for a funnel it is earlier.
        chosen = np.unique(np.round((len(path) - 1) * np.linspace(0, 1, _POINTS) ** 0.5).astype(int))
        half = generator(key).normal(size=(_DRAWS // 2, self.target.dim))
        noise = np.concatenate([half, -half])
        found = [g for point in path[chosen] if (g := self._at(point, noise, path[-1])) is not None]
        return max(found, key=lambda g: g.elbo, default=None)

    def _at(self, point, noise, mode) -> Gaussian | None:
        hessian = self._derivatives.hessian(point)
        if hessian is None:
            return None
        scale, half_log_det = _factor(-hessian)
        values = np.array([self.value(point + scale @ x)[0] for x in noise])
        elbo = values.mean() + half_log_det + len(point) / 2 * (1 + np.log(2 * np.pi))
        return Gaussian(point, scale, float(elbo), mode) if np.isfinite(elbo) else None


def starts(key: PRNGKeyArray, target: Target, search: Search, count: int) -> Float[np.ndarray, "n dim"]:
    """Random points at which the density and its gradient are finite, up to `count` of them."""
    points, tries = [], max(100, 10 * count)
    for number in range(tries):
        point = target.start(jr.fold_in(key, number))
        if search.is_finite(point):
            points.append(point)
        if len(points) == count:
            break
    if not points:
        value, _ = search.value(target.start(key))
        raise ValueError(
            f"Expected log_density and its gradient to be finite somewhere; got {value} or similar at {tries} random "
            "points. Check the model, or pass starting points with Target(..., initial=...)."
        )
    return np.stack(points)


def gaussians(key: PRNGKeyArray, target: Target, search: Search, count: int) -> list[Gaussian]:
    """Gaussians found from `count` random starts, the best first, each mode once."""
    key, start_key = jr.split(key)
    found = [search.gaussian(key, start) for start in starts(start_key, target, search, count)]
    ranked = sorted((g for g in found if g is not None), key=lambda g: -g.elbo)
    if not ranked:
        raise ValueError(
            "Expected a log_density that is finite and smooth around its modes; got NaN or infinity there. "
            "Bounded parameters must be transformed to unbounded ones."
        )
    if not ranked[0].elbo < 1e25:
        raise ValueError(IMPROPER.format(found="grows without bound"))
    distinct = ranked[:1]
    for g in ranked[1:]:
        if search.is_mode(g.mode) and all(is_apart(g.mode, other) for other in distinct):
            distinct.append(g)
    # A mode of no weight does not matter.
    return [g for g in distinct if g.elbo > ranked[0].elbo - 7]


def with_more_modes(key: PRNGKeyArray, search: Search, found: list[Gaussian], points: list) -> list[Gaussian]:
    """The Gaussians, and those at further modes above some points; a mode of no weight does not matter."""
    found = list(found)
    for point in points:
        mode = search.mode_from(point)
        if mode is None or not all(is_apart(mode, g) for g in found):
            continue
        g = search.gaussian(key, mode)
        if g is not None and g.elbo > found[0].elbo - 7:
            found.append(g)
    return sorted(found, key=lambda g: -g.elbo)


def with_all_modes(key: PRNGKeyArray, search: Search, found: list[Gaussian]) -> list[Gaussian]:
    """If there are several modes, searches around them until many searches in a row have found no new mode.

    With k modes of equal reach, n searches miss one of them with probability (1 - 1 / k)^n.
    """
    rng, idle = generator(key), 0
    for _ in range(_MOST_SEARCHES if len(found) > 1 else 0):
        modes = np.stack([g.mode for g in found])
        own = np.mean([np.sum(g.scale**2, axis=1) for g in found], axis=0)
        point = modes.mean(axis=0) + 1.5 * np.sqrt(modes.var(axis=0) + own) * rng.normal(size=modes.shape[1])
        more = with_more_modes(key, search, found, [point])
        idle = idle + 1 if len(more) == len(found) else 0
        found = more
        if idle >= max(_IDLE_SEARCHES[0], _IDLE_SEARCHES[1] * len(found)):
            break
    return found


def is_apart(point: Float[np.ndarray, " dim"], gaussian: Gaussian) -> bool:
    """Whether a mode lies outside the bulk of a Gaussian: not the same mode found with another precision."""
    whitened = np.linalg.solve(gaussian.scale, point - gaussian.mode)
    return bool(np.sum(whitened**2) > 4 * (len(point) + 3 * np.sqrt(2 * len(point))))


def merged(modes: list[Gaussian]) -> Gaussian:
    """One Gaussian with the mean and covariance of the mixture of all."""
    best = modes[0]
    if len(modes) == 1:
        return best
    weights = np.exp([g.elbo - best.elbo for g in modes])
    weights /= weights.sum()
    mean = sum((w * g.mean for w, g in zip(weights, modes, strict=True)), np.zeros_like(best.mean))
    parts = ((g.scale @ g.scale.T + np.outer(g.mean - mean, g.mean - mean)) for g in modes)
    covariance = sum((w * part for w, part in zip(weights, parts, strict=True)), np.zeros_like(best.scale))
    return Gaussian(mean, np.linalg.cholesky(covariance), best.elbo, best.mode)


def _inverse_root(matrix):
    """The lower triangle L with L L^T = matrix^-1; None unless the matrix is clearly positive definite.

    Its Cholesky factor from the last row up is an upper triangle U with U U^T = matrix, so L = U^-T.
    """
    try:
        upper = np.linalg.cholesky(matrix[::-1, ::-1])[::-1, ::-1]
    except np.linalg.LinAlgError:
        return None
    if np.diag(upper).min() < 1e-3:
        return None
    return linalg.solve_triangular(upper, np.eye(len(matrix)), trans=1, lower=False)


def _factor(precision):
    """A lower triangular L with L L^T = |precision|^-1, and half the log-determinant of that.

    Directions in which the target curves upwards enter by the absolute value of their curvature.
    """
    scale = np.sqrt(np.maximum(np.abs(np.diag(precision)), 1e-30))
    triangle = _inverse_root(precision / np.outer(scale, scale))
    if triangle is not None:
        triangle = triangle / scale[:, None]
        return triangle, float(np.sum(np.log(np.diag(triangle))))
    values, vectors = np.linalg.eigh(precision / np.outer(scale, scale))
    values = np.maximum(np.abs(values), max(1e-8 * np.abs(values).max(), 1e-30))
    root = (vectors / np.sqrt(values)) / scale[:, None]
    # root root^T = L L^T: the triangle comes from a QR of root^T, which needs no squares.
    triangle = np.asarray(np.linalg.qr(root.T, mode="r")).T
    triangle = triangle * np.sign(np.diag(triangle))
    return triangle, float(np.sum(np.log(np.diag(triangle))))
