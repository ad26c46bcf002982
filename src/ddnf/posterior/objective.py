"""KL(q|p) from draws of q, in coordinates in which p is standardized."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import paramax
from flowjax.bijections import AbstractBijection, Affine, Chain, Identity, TriangularAffine
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ddnf.flow import batch
from ddnf.flow.log_det import Exact, has_probes, with_key
from ddnf.flow.parts import ddnf_parts
from ddnf.posterior.evaluate import Base, draw_base
from ddnf.system.compiling import quick_jit
from ddnf.training.devices import shared_map, shared_rows
from ddnf.training.loop import Draw

End = Literal["full", "diagonal"]
Gradient = Literal["path", "total"]


class Whitening(eqx.Module):
    """z = mean + scale u: the affine map that standardizes the target; `scale` is triangular, or a vector.

    It stays fixed while the flow and its affine end are trained in u, where all parameters are of order 1. It is then
    merged into the affine end.
    """

    mean: Float[Array, " dim"]
    scale: Float[Array, "dim *dim"]

    def __call__(self, u: Float[Array, " dim"]) -> Float[Array, " dim"]:
        return self.mean + (self.scale @ u if self.scale.ndim == 2 else self.scale * u)

    def pull(self, score: Float[Array, "n dim"]) -> Float[Array, "n dim"]:
        """Gradients with respect to z as gradients with respect to u."""
        return score @ self.scale if self.scale.ndim == 2 else score * self.scale

    @property
    def log_det(self) -> Float[Array, ""]:
        return jnp.sum(jnp.log(jnp.diag(self.scale) if self.scale.ndim == 2 else self.scale))

    def end(self) -> AbstractBijection:
        """An affine end for a flow, initialised to the identity."""
        return _identity(len(self.mean), self.scale.ndim, self.mean.dtype)

    def merge(self, flow: Chain) -> Chain:
        """The chain of a flow and its affine end, with the whitening merged into the end."""
        *parts, end = flow.bijections
        return chain([*parts, _merged(self, end)])


@quick_jit
def _merged(whiten: Whitening, end):
    # Unwrapped: wrappers around parameters hold functions, and new ones would cause recompilation.
    end = paramax.unwrap(end)
    if isinstance(end, TriangularAffine):
        assert not isinstance(end.triangular, paramax.AbstractUnwrappable)
        merged = whiten(end.loc), whiten.scale @ end.triangular
        return eqx.tree_at(lambda e: (e.loc, e.triangular), end, merged)
    assert isinstance(end, Affine) and not isinstance(end.scale, paramax.AbstractUnwrappable)
    return eqx.tree_at(lambda e: (e.loc, e.scale), end, (whiten(end.loc), whiten.scale * end.scale))


@lru_cache
def _identity(dim, ndim, dtype):
    """The affine identity. Its parameters are filled in: FlowJAX computes them by many small programs."""
    loc, one = np.zeros(dim, dtype), np.log(np.expm1(np.ones(dim, dtype)))  # softplus(one) = 1
    if ndim == 2:
        end = eqx.filter_eval_shape(TriangularAffine, loc, jax.ShapeDtypeStruct((dim, dim), dtype))
        return _filled(end, jax.device_put((loc, np.diag(one))))
    end = eqx.filter_eval_shape(Affine, loc, loc)
    return _filled(end, jax.device_put((loc, one)))


def _filled(end, arrays):
    shapes, static = eqx.partition(end, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    leaves, structure = jax.tree.flatten(shapes)
    assert [leaf.shape for leaf in leaves] == [array.shape for array in arrays]
    return eqx.combine(jax.tree.unflatten(structure, arrays), static)


def chain(parts: Sequence[Any]) -> Chain:
    """A chain of bijections of one shape. FlowJAX's constructor would compute their parameters to check shapes."""
    blank = Chain([Identity(part.shape) for part in parts])
    return eqx.tree_at(lambda c: c.bijections, blank, tuple(parts), is_leaf=lambda node: node is blank.bijections)


def whitening(mean: Float[np.ndarray, " dim"], scale: Float[np.ndarray, "dim dim"], end: End) -> Whitening:
    """The whitening by a Gaussian."""
    dtype = jnp.result_type(float)
    factor = scale if end == "full" else np.sqrt(np.sum(scale**2, axis=1))
    return Whitening(*jax.device_put((np.asarray(mean, dtype), np.asarray(factor, dtype))))


class Asked(NamedTuple):
    """Points at which the target is wanted, and what the loss needs of the flow there.

    Attributes:
        z: the points.
        x: the draws of the base that they come from.
        log_q: log density of the flow at the points, in coordinates of the whitening.
        score: gradient of `log_q`.
    """

    z: Float[Array, "n dim"]
    x: Float[Array, "n dim"]
    log_q: Float[Array, " n"]
    score: Float[Array, "n dim"]


class PathGradient(eqx.Module):
    """KL(q|p) with the path gradient, from values and gradients of the target that are computed elsewhere.

    The gradient is taken through the draws only. The direct dependence of log q on the parameters, whose gradient has
    expectation zero, is left out (Roeder, Wu and Duvenaud, 2017; Vaitl et al., 2022). The variance vanishes if q = p.
    The score of q is propagated with the draws (see `ddnf.flow.batch`). The target is not part of this program: `ask`
    returns the points, and `draw.rows` of the loss has these points, the log density of the target and its gradient.

    The target is tempered for the first `temper` steps; the returned value is for the untempered target.

    A quarter of the draws is spread out by `spread`. If q = p, the two scores agree everywhere, so this does not change
    the solution. Distant draws improve the fit of the tails, on which k-hat depends. With a `base` other than the
    standard normal, no draws are spread out.
    """

    whitening: Whitening | None
    regularizer: Callable | None
    batch: int = eqx.field(static=True)
    temper: Int[Array, ""]
    spread: Float[Array, ""]
    base: Base | None = None
    mesh: Mesh | None = eqx.field(static=True, default=None)

    def rows(self, dim: int) -> tuple[Asked, Any, Any]:
        """Shapes of what is asked and of the answers."""
        points, values = (
            jax.ShapeDtypeStruct(shape, jnp.result_type(float)) for shape in ((self.batch, dim), (self.batch,))
        )
        return Asked(points, points, values, points), values, points  # pyright: ignore[reportArgumentType]

    def ask(self, flow: AbstractBijection, key: PRNGKeyArray) -> Asked:
        """Draws of the flow at which the loss needs the target."""
        x, log_q = draw_base(self.base, key, self.batch, flow.shape)
        if self.base is None:
            spread = jnp.where(4 * jnp.arange(self.batch) < self.batch, self.spread, 1.0)[:, None]
            log_q, x = log_q + jnp.sum(x**2 * (1 - spread**2), axis=-1) / 2, x * spread
            score = -x
        else:
            score = jax.vmap(jax.grad(self.base.log_prob))(x)
        x, score = shared_rows(self.mesh, x), shared_rows(self.mesh, score)
        u, log_det, score = batch.transform_with_score(_frozen(flow), x, score)
        return Asked(u if self.whitening is None else jax.vmap(self.whitening)(u), x, log_q - log_det, score)

    def __call__(self, flow: AbstractBijection, draw: Draw) -> Float[Array, ""]:
        asked, log_p, score_p = draw.rows
        if self.whitening is not None:
            log_p, score_p = log_p + self.whitening.log_det, self.whitening.pull(score_p)
        # Draws at which the target is not finite are left out, unless they are the majority.
        known = jnp.isfinite(log_p) & jnp.isfinite(score_p).all(axis=-1)
        known = known | (2 * jnp.sum(known) < self.batch)
        slope = jnp.where(known[:, None], asked.score - _warmth(draw.step, self.temper) * score_p, 0.0)
        moved = batch.transform(flow, asked.x)
        value = jnp.sum(jnp.where(known, asked.log_q - log_p, 0.0)) / jnp.sum(known)
        surrogate = jnp.mean(jnp.sum(slope * moved, axis=-1))
        surrogate = surrogate + _penalty(self.regularizer, flow, asked.x, self.whitening)
        return lax.stop_gradient(value - surrogate) + surrogate


class ReverseKL(eqx.Module):
    """The loss of a step: E_q[log q - log p] over `batch` draws, which is KL(q|p) minus log Z of the target.

    The devices of a mesh share the draws.

    One program with the target in it. With ``gradient="path"`` it is that of `PathGradient`, with "total" the plain
    reparameterization gradient.
    """

    log_density: Callable
    whitening: Whitening | None
    regularizer: Callable | None
    batch: int = eqx.field(static=True)
    gradient: Gradient = eqx.field(static=True)
    temper: int = eqx.field(static=True)
    spread: Float[Array, ""]
    base: Base | None = None
    mesh: Mesh | None = eqx.field(static=True, default=None)

    def __call__(self, flow: AbstractBijection, draw: Draw) -> Float[Array, ""]:
        if self.gradient == "path":
            path = self.path
            asked = path.ask(flow, draw.key)
            answer = shared_map(self.mesh, lambda p, z: jax.vmap(jax.value_and_grad(p))(z), self.log_density, asked.z)
            return path(flow, draw._replace(rows=lax.stop_gradient((asked, *answer))))
        x, log_q = draw_base(self.base, draw.key, self.batch, flow.shape)
        u, log_det = self._moved(flow, shared_rows(self.mesh, x), jr.fold_in(draw.key, 1))
        log_p = shared_map(self.mesh, lambda loss, u: jax.vmap(loss._whitened)(u), self, u)
        value = jnp.mean(log_q - log_det - log_p)
        surrogate = jnp.mean(-log_det - _warmth(draw.step, self.temper) * log_p)
        surrogate = surrogate + _penalty(self.regularizer, flow, x, self.whitening)
        return lax.stop_gradient(value - surrogate) + surrogate

    @property
    def path(self) -> PathGradient:
        """The same loss without the target in it."""
        temper = jax.device_put(np.asarray(self.temper, np.int32))
        return PathGradient(self.whitening, self.regularizer, self.batch, temper, self.spread, self.base, self.mesh)

    def _moved(self, flow, x, key):
        if not has_probes(flow):
            return batch.transform_and_log_det(flow, x)
        keys = jr.split(key, self.batch)
        return jax.vmap(lambda x, key: with_key(flow, key).transform_and_log_det(x))(x, keys)

    def _whitened(self, u):
        if self.whitening is None:
            return self.log_density(u)
        return self.log_density(self.whitening(u)) + self.whitening.log_det


def _warmth(step: Int[Array, ""], temper: Int[Array, ""] | int) -> Float[Array, ""]:
    """The factor of a tempered log density: from 0.1 to 1 in `temper` steps; 1 if that is 0."""
    return jnp.where(temper == 0, 1.0, jnp.minimum(1.0, 0.1 + (step + 1) / jnp.maximum(1, temper)))


def _penalty(regularizer, flow, x, whiten):
    """The mean of a regularizer over draws; it sees the flow without its affine end."""
    if regularizer is None:
        return 0.0
    inner = flow if whiten is None else flow.bijections[0]
    return jnp.mean(jax.vmap(lambda x: regularizer(inner, x))(x))


def _frozen(flow):
    return jax.tree.map(lambda a: lax.stop_gradient(a) if eqx.is_array(a) else a, flow)


def best_gradient(flow: AbstractBijection) -> Gradient:
    """The path gradient where the flow can carry scores and has the exact log-determinant, else the total one.

    Example:
        >>> import ddnf, jax.random as jr
        >>> best_gradient(ddnf.DDNF(jr.key(0), 2))
        'path'
    """
    is_exact = all(isinstance(part.log_det, Exact) for part in ddnf_parts(flow))
    # Uses shapes only, because unwrapping parameters would compute them.
    return "path" if is_exact and eqx.filter_eval_shape(batch.carries_score, flow) else "total"
