"""Flows and log densities at many points, with one compiled program for any number of them."""

from abc import abstractmethod
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection
from flowjax.distributions import AbstractDistribution, Transformed
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow import batch
from ddnf.flow.random import normal_log_prob, normals
from ddnf.system.compiling import quick_jit
from ddnf.training.devices import on_all, shared_rows

_BATCH = 500
_DRAWN = 2000


class LostFitError(ValueError):
    """A fit without a single draw where the target has density."""


class Base(AbstractDistribution):
    """A distribution that a flow may start from instead of the standard normal."""

    @abstractmethod
    def draw(self, key: PRNGKeyArray, n: int) -> tuple[Float[Array, "n dim"], Float[Array, " n"]]:
        """n draws, and their log density."""

    @abstractmethod
    def swap(self, key: PRNGKeyArray, x: Float[Array, "n dim"]) -> tuple[Float[Array, "n dim"], Float[Array, " n"]]:
        """Proposals of Markov chains to move from x to the corresponding point of another component, and the correction
        to add to the difference of the log densities in the acceptance probability."""


def draw(
    flow: AbstractBijection, key: PRNGKeyArray, n: int, *, base: Base | None = None, mesh: Mesh | None = None
) -> tuple[Float[Array, "n dim"], Float[Array, " n"]]:
    """n draws of the flow, and their log density; from a standard normal if no base is given.

    Example:
        >>> import ddnf, jax.random as jr
        >>> z, log_q = draw(ddnf.DDNF(jr.key(0), 2), jr.key(1), 5)
        >>> z.shape, log_q.shape
        ((5, 2), (5,))
    """
    return _draw(flow, base, key, n, mesh)


def compile_draws(flow: AbstractBijection, key: PRNGKeyArray, base: Base | None = None) -> None:
    """Compiles the program of `draw_in_parts` without running it."""
    _draw.lower(flow, base, key, _DRAWN, None).compile()


def draw_in_parts(
    flow: AbstractBijection, key: PRNGKeyArray, n: int, *, base: Base | None = None, mesh: Mesh | None = None
) -> tuple[Float[np.ndarray, "n dim"], Float[np.ndarray, " n"]]:
    """As `draw`, with one compiled program for every n; fewer draws are the first of more.

    Example:
        >>> import ddnf, jax.random as jr
        >>> flow = ddnf.DDNF(jr.key(0), 2)
        >>> few, many = (draw_in_parts(flow, jr.key(1), n)[0] for n in (5, 3000))
        >>> many.shape, bool((few == many[:5]).all())
        ((3000, 2), True)
    """
    keys = (jr.fold_in(key, number) for number in range(-(-n // _DRAWN)))
    parts = [draw(flow, part, _DRAWN, base=base, mesh=mesh) for part in keys]
    z, log_q = (np.concatenate([np.asarray(array) for array in arrays])[:n] for arrays in zip(*parts, strict=True))
    return z, log_q


@quick_jit
def _draw(flow, base, key, n, mesh):
    x, log_base = draw_base(base, key, n, flow.shape)
    z, log_det = batch.transform_and_log_det(flow, shared_rows(mesh, x))
    return on_all(mesh, (z, log_base - log_det))


def draw_base(base: Base | None, key: PRNGKeyArray, n: int, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """n draws of the base and their log density."""
    if base is not None:
        return base.draw(key, n)
    x = normals(key, n, shape)
    return x, normal_log_prob(x)


def log_density(function: Callable[[Array], Array], z: Float[Array | np.ndarray, "n dim"]) -> Float[Array, " n"]:
    """A log density at many points, in batches of one size: the same program for every n.

    Example:
        >>> log_density(lambda z: -jnp.sum(z**2) / 2, jnp.zeros((3, 2))).shape
        (3,)
    """
    points = np.asarray(z, jnp.result_type(float))
    values = []
    for first in range(0, len(points), _BATCH):
        part = points[first : first + _BATCH]
        padded = np.concatenate([part, np.repeat(part[-1:], _BATCH - len(part), axis=0)])
        values.append(np.asarray(_batch(function, padded))[: len(part)])
    return jnp.asarray(np.concatenate(values))


@eqx.filter_jit
def _batch(function, z):
    return jax.vmap(function)(z)


@eqx.filter_jit
def log_prob(distribution: Transformed, z: Float[Array, "n dim"]) -> Float[Array, " n"]:
    """A distribution's log density at many points."""
    x, log_det = batch.inverse_and_log_det(distribution.bijection, z)
    value = jax.vmap(distribution.base_dist.log_prob)(x) + log_det
    return jnp.where(jnp.isnan(value), -jnp.inf, value)


def clean(log_weights: Float[Array | np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Log weights with weight zero where the target is not finite.

    Example:
        >>> clean(jnp.array([0.0, jnp.nan])).tolist()
        [0.0, -inf]
    """
    values = np.asarray(log_weights, float)
    values = np.where(np.isfinite(values), values, -np.inf)
    if not np.isfinite(values).any():
        raise LostFitError("Expected a log_density that is finite at some draws of the fit; got none of them.")
    return values
