"""A subsample of rows in the place of all of them, corrected to second order.

With n rows, m of them in the subsample S, and a point c near the mode,

    log q(z) = log prior(z) + (n / m) sum_S (l_i(z) - l_i(c)) + g . d + d . H d / 2,    d = z - c,

where g and H are the gradient and Hessian at c of all rows, minus those of the subsample. The difference from the log
density of all rows is third-order noise, n m^(-1/2) |d|^3. With many rows, the posterior is so narrow that a small
subsample suffices. `rows_needed` measures its size.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ddnf.posterior.curvature import Derivatives
from ddnf.posterior.regions import bulk_radius
from ddnf.posterior.rows import Rows, sum_in_chunks
from ddnf.posterior.target import Target

# Standard deviation, over draws, of the noise that a subsample may leave in the log density.
NOISE = 0.05
_PILOT = 2000
_DRAWS = 32


class Expansion(eqx.Module):
    """A point near the mode, the value, gradient and Hessian of the log density there, and the scale of a Gaussian."""

    point: Float[np.ndarray, " dim"]
    value: float
    gradient: Float[np.ndarray, " dim"]
    hessian: Float[np.ndarray, "dim dim"]
    scale: Float[np.ndarray, "dim dim"]


class Subsampled(eqx.Module):
    """The log density by a subsample of rows, relative to its value at a point; see the formula above.

    Beyond `radius` standard deviations, the correction is constant along rays, so that it cannot dominate the tails of
    a density that falls more slowly than a quadratic.
    """

    rows: Rows = eqx.field(static=True)
    data: Any
    offsets: Float[Array, " m"]
    weight: Float[Array, ""]
    point: Float[Array, " dim"]
    prior: Float[Array, ""]
    gradient: Float[Array, " dim"]
    hessian: Float[Array, "dim dim"]
    whiten: Float[Array, "dim dim"]
    radius: Float[Array, ""]

    def __call__(self, z: Float[Array, " dim"]) -> Float[Array, ""]:
        z = z.astype(self.point.dtype)
        total = sum_in_chunks(self.rows.log_likelihood, z, self.data, self.offsets)
        return self.rows.log_prior(z) - self.prior + self.weight * total + self._correction(z - self.point)

    def _correction(self, d):
        distance = jnp.sum((self.whiten @ d) ** 2)
        d = d * self.radius / jnp.sqrt(jnp.maximum(distance, self.radius**2))
        return self.gradient @ d + d @ (self.hessian @ d) / 2


def subsample(target: Target, indices: Int[np.ndarray, " m"], at: Expansion | Float[np.ndarray, " dim"]) -> Target:
    """The target by some of its rows; corrected to second order if an expansion with all rows is given.

    Example:
        >>> y = np.random.default_rng(0).normal(size=1000)
        >>> target = Target(lambda z: -jnp.sum(z**2) / 2, 1, rows=y, log_likelihood=lambda z, y: -((y - z[0]) ** 2) / 2)
        >>> full = Derivatives(target.programs)
        >>> point = np.array([0.1])
        >>> at = Expansion(point, *full.value_and_gradient(point), full.hessian(point), np.eye(1) / 32)
        >>> few = subsample(target, np.arange(10), at)
        >>> wanted = target.programs.values(np.array([[0.12]])) - at.value
        >>> np.allclose(few.programs.values(np.array([[0.12]])), wanted, atol=1e-3)
        True
    """
    rows = target.rows
    assert rows is not None
    dtype = jnp.result_type(float)
    point = np.asarray(at.point if isinstance(at, Expansion) else at, dtype)
    data = jax.tree.map(jnp.asarray, rows.take(indices))
    offsets = jax.jit(rows.log_likelihood)(point, data).astype(dtype)
    prior = jax.jit(rows.log_prior)(point).astype(dtype)
    zero = jnp.zeros_like(point)
    none = zero, jnp.diag(zero), jnp.diag(zero), jnp.ones((), dtype)
    weight = jnp.asarray(rows.count / len(indices), dtype)
    density = Subsampled(rows, data, offsets, weight, jnp.asarray(point), prior, *none)
    plain = _like(target, density)
    if not isinstance(at, Expansion) or len(indices) == rows.count:
        return plain
    derivatives = Derivatives(plain.programs)
    _, gradient = derivatives.value_and_gradient(point)
    hessian = derivatives.hessian(point)
    if hessian is None:
        return plain
    lacking = at.gradient - gradient, at.hessian - hessian, np.linalg.inv(at.scale)
    # The mode of the subsample alone is about sqrt(dim n / m) deviations away: the correction must reach beyond.
    radius = 4 * np.sqrt(bulk_radius(target.dim) * rows.count / len(indices))
    new = [jnp.asarray(array, dtype) for array in (*lacking, radius)]
    fields = ("gradient", "hessian", "whiten", "radius")
    return _like(target, eqx.tree_at(lambda d: [getattr(d, name) for name in fields], density, new))


def rows_needed(
    generator: np.random.Generator, target: Target, at: Expansion, noise: float = NOISE
) -> tuple[int, Float[np.ndarray, " draws"]]:
    """How many rows leave this much noise in the log density, from some rows and draws of the Gaussian.

    The remainder of a row, l(z) minus its own expansion to second order at the point, has a deviation s over rows; the
    sum over m of n rows, scaled by n / m, has the deviation n s / sqrt(m).
    """
    rows = target.rows
    assert rows is not None
    dtype = jnp.result_type(float)
    indices = generator.choice(rows.count, min(_PILOT, rows.count), replace=False)
    data = jax.tree.map(jnp.asarray, rows.take(indices))
    steps = (generator.normal(size=(_DRAWS, rows.dim)) @ at.scale.T).astype(dtype)
    remainders = np.asarray(jax.jit(_remainders, static_argnums=0)(rows, at.point.astype(dtype), steps, data), float)
    spread = remainders.std(axis=1)
    usual = float(np.sqrt(np.mean(spread**2))) if np.isfinite(spread).all() else np.inf
    needed = (rows.count * usual / noise) ** 2
    return int(min(np.ceil(needed), rows.count)), spread


def _remainders(rows: Rows, point, steps, data):
    def one(step):
        def along(t):
            return rows.log_likelihood(point + t * step, data)

        zero, unit = jnp.zeros((), point.dtype), jnp.ones((), point.dtype)
        first = lambda t: jax.jvp(along, (t,), (unit,))  # noqa: E731
        (value, slope), (_, bend) = jax.jvp(first, (zero,), (unit,))
        return along(unit) - value - slope - bend / 2

    return jax.lax.map(one, steps)


def some_rows(target: Target, indices: Int[np.ndarray, " m"]) -> Target:
    """The target by some of its rows, without a correction, in the programs of all rows.

    Example:
        >>> y = np.arange(10.0)
        >>> target = Target(lambda z: -jnp.sum(z**2) / 2, 1, rows=y, log_likelihood=lambda z, y: y * z[0])
        >>> some_rows(target, np.array([1, 3])).programs.values(np.ones((1, 1))).tolist()
        [19.5]
    """
    rows = target.rows
    assert rows is not None
    return _like(target, rows.log_prior, rows.some(indices))


def _like(target: Target, density, rows: Rows | None = None) -> Target:
    functions = dict(constrain=target.constrain, initial=target.initial, unconstrain=target.unconstrain)
    known = Target(density, target.dim, **functions, sites=target.sites, details=target.details, rows=rows)
    return known.on(target.mesh)
