"""Whole batches through a bijection, with the batch in the minor axis of memory.

`jax.vmap` of a flow is correct in any order with `jit` and `grad`, but puts the batch in the *first* axis. For points
of few dimensions, this takes up to twice as long as a batch in the *last* axis. The functions here apply any bijection
to a batch ``(n, dim)`` in the fastest available way: a `BatchedBijection` has its own methods, chains and inverses are
applied part by part, and all others are mapped by `vmap`.
"""

from abc import abstractmethod
from collections.abc import Callable

import jax
import jax.numpy as jnp
import paramax
from flowjax.bijections import AbstractBijection, Affine, Chain, Identity, Invert, Loc, Scale, TriangularAffine
from jax import lax
from jaxtyping import Array, Float, PyTree

from ddnf.flow.linalg import inverse

Batch = tuple[Float[Array, "n dim"], Float[Array, " n"]]
BatchWithScore = tuple[Float[Array, "n dim"], Float[Array, " n"], Float[Array, "n dim"]]

# Bijections with a constant Jacobian, whose inverse is cheap.
_AFFINE = (Affine, Identity, Loc, Scale, TriangularAffine)
# Up to this dimension, the Jacobian of an unknown bijection and its inverse are cheap.
_LARGEST_JACOBIAN = 8


class BatchedBijection(AbstractBijection):
    """A bijection with methods of its own for whole batches; `condition` is one for all points, or one for each."""

    @abstractmethod
    def batch_transform_and_log_det(self, x: Float[Array, "n dim"], condition: Array | None = None) -> Batch:
        """`transform_and_log_det` of every row."""

    def batch_transform(self, x: Float[Array, "n dim"], condition: Array | None = None) -> Float[Array, "n dim"]:
        """`transform` of every row."""
        return self.batch_transform_and_log_det(x, condition)[0]

    @abstractmethod
    def batch_inverse_and_log_det(self, y: Float[Array, "n dim"], condition: Array | None = None) -> Batch:
        """`inverse_and_log_det` of every row."""

    @abstractmethod
    def batch_transform_with_score(
        self, x: Float[Array, "n dim"], score: Float[Array, "n dim"], condition: Array | None = None
    ) -> BatchWithScore:
        """`transform_with_score` of every row."""


def transform_and_log_det(
    bijection: AbstractBijection, x: Float[Array, "n dim"], condition: Array | None = None
) -> Batch:
    """The image of every row of x under a bijection, with its log-determinant.

    Example:
        >>> import jax.numpy as jnp
        >>> chain = Chain([Scale(jnp.array([2.0])), Loc(jnp.ones(1))])
        >>> transform_and_log_det(chain, jnp.ones((3, 1)))[0].ravel().tolist()
        [3.0, 3.0, 3.0]
    """
    bijection = paramax.unwrap(bijection)
    if isinstance(bijection, Chain):
        return _chain(transform_and_log_det, bijection.bijections, x, condition)
    if isinstance(bijection, Invert):
        return inverse_and_log_det(bijection.bijection, x, condition)
    if isinstance(bijection, BatchedBijection):
        return bijection.batch_transform_and_log_det(x, condition)
    return _vmap(bijection.transform_and_log_det, bijection, x, condition)


def transform(
    bijection: AbstractBijection, x: Float[Array, "n dim"], condition: Array | None = None
) -> Float[Array, "n dim"]:
    """The image of every row of x under a bijection, without log-determinants. This halves the work of gradients.

    Example:
        >>> import jax.numpy as jnp
        >>> transform(Scale(jnp.array([2.0])), jnp.ones((3, 1))).ravel().tolist()
        [2.0, 2.0, 2.0]
    """
    bijection = paramax.unwrap(bijection)
    if isinstance(bijection, Chain):
        for part in bijection.bijections:
            x = transform(part, x, condition)  # pyright: ignore[reportArgumentType]
        return x
    if isinstance(bijection, BatchedBijection):
        return bijection.batch_transform(x, condition)
    return _vmap(bijection.transform, bijection, x, condition)


def inverse_and_log_det(
    bijection: AbstractBijection, y: Float[Array, "n dim"], condition: Array | None = None
) -> Batch:
    """The preimage of every row of y under a bijection, with the log-determinant of the inverse.

    Example:
        >>> import jax.numpy as jnp
        >>> inverse_and_log_det(Invert(Scale(jnp.array([2.0]))), jnp.ones((3, 1)))[0].ravel().tolist()
        [2.0, 2.0, 2.0]
    """
    bijection = paramax.unwrap(bijection)
    if isinstance(bijection, Chain):
        return _chain(inverse_and_log_det, reversed(bijection.bijections), y, condition)
    if isinstance(bijection, Invert):
        return transform_and_log_det(bijection.bijection, y, condition)
    if isinstance(bijection, BatchedBijection):
        return bijection.batch_inverse_and_log_det(y, condition)
    return _vmap(bijection.inverse_and_log_det, bijection, y, condition)


def transform_with_score(
    bijection: AbstractBijection, x: Float[Array, "n dim"], score: Float[Array, "n dim"], condition: Array | None = None
) -> BatchWithScore:
    """The image of every row of x under a bijection, with the transformed gradient of a log density.

    The score of the transformed density is J^-T (score - grad log det). With it, path gradients need no inverse.

    Example:
        >>> import jax.numpy as jnp
        >>> y, log_det, score = transform_with_score(Scale(jnp.array([2.0])), jnp.ones((1, 1)), -jnp.ones((1, 1)))
        >>> y.tolist(), score.tolist()
        ([[2.0]], [[-0.5]])
    """
    bijection = paramax.unwrap(bijection)
    if isinstance(bijection, Chain):
        total = jnp.zeros(len(x), x.dtype)
        for part in bijection.bijections:
            x, log_det, score = transform_with_score(part, x, score, condition)  # pyright: ignore[reportArgumentType]
            total = total + log_det
        return x, total, score
    if isinstance(bijection, BatchedBijection):
        return bijection.batch_transform_with_score(x, score, condition)
    condition, axis = _for(bijection, condition)
    return jax.vmap(lambda x, s, c: _one_with_score(bijection, x, s, c), (0, 0, axis))(x, score, condition)


def carries_score(bijection: AbstractBijection) -> bool:
    """Whether `transform_with_score` is cheap: `DDNF`, affine maps, any bijection of few dimensions, and chains.

    Example:
        >>> from flowjax.bijections import Exp
        >>> carries_score(Exp((2,))), carries_score(Exp((50,)))
        (True, False)
    """
    bijection = paramax.unwrap(bijection)
    if isinstance(bijection, Chain):
        return all(isinstance(part, AbstractBijection) and carries_score(part) for part in bijection.bijections)
    return isinstance(bijection, (BatchedBijection, *_AFFINE)) or bijection.shape[0] <= _LARGEST_JACOBIAN


def run_lanes(function: Callable, points: PyTree, *, chunk: int) -> PyTree:
    """``function(points)`` with the first axis of each point moved to the last, and back again in the result.

    On a CPU, at most `chunk` points are computed at a time, so that their data stay in the caches, and because
    iterations run until the slowest point has converged. On other devices, the batch is not split.
    """
    lanes = jax.tree.map(lambda p: jnp.moveaxis(p, 0, -1), points)
    size = jax.tree.leaves(lanes)[0].shape[-1]
    if jax.default_backend() != "cpu" or size <= chunk:
        out = function(lanes)
    else:
        out = _in_chunks(function, lanes, size, -(-size // chunk))
    return jax.tree.map(lambda y: jnp.moveaxis(y, -1, 0), out)


def _in_chunks(function: Callable, lanes: PyTree, size: int, count: int) -> PyTree:
    width = -(-size // count)

    def split(p):
        padded = jnp.concatenate([p, jnp.repeat(p[..., -1:], count * width - size, axis=-1)], axis=-1)
        return jnp.moveaxis(padded.reshape(*p.shape[:-1], count, width), -2, 0)

    def join(y):
        y = jnp.moveaxis(y, 0, -2)
        return y.reshape(*y.shape[:-2], count * width)[..., :size]

    return jax.tree.map(join, lax.map(function, jax.tree.map(split, lanes)))


def _chain(go: Callable, parts, x, condition) -> Batch:
    total = jnp.zeros(len(x), x.dtype)
    for part in parts:
        x, log_det = go(part, x, condition)
        total = total + log_det
    return x, total


def _for(bijection, condition) -> tuple[Array | None, int | None]:
    """The condition where the bijection takes one, and the axis to map over."""
    if bijection.cond_shape is None or condition is None:
        return None, None
    return condition, 0 if condition.ndim > len(bijection.cond_shape) else None


def _vmap(function, bijection, x, condition):
    condition, axis = _for(bijection, condition)
    return jax.vmap(function, (0, axis))(x, condition)


def _one_with_score(bijection, x, score, condition):
    y, log_det = bijection.transform_and_log_det(x, condition)
    if isinstance(bijection, _AFFINE):  # with a constant log-determinant
        _, pull = jax.vjp(bijection.inverse, y)
        return y, log_det, pull(score)[0]
    jacobian = jax.jacobian(bijection.transform)(x, condition)
    change = jax.grad(lambda x: bijection.transform_and_log_det(x, condition)[1])(x)
    return y, log_det, (score - change) @ inverse(jacobian)
