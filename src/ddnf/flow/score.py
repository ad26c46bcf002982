"""Carries the gradient of a log density through a bijection, so that path-derivative gradients need no inverse pass."""

import jax
import paramax
from flowjax.bijections import AbstractBijection, Affine, Chain, Identity, Loc, Scale, TriangularAffine
from jaxtyping import Array, Float

from ddnf.flow.bijection import DDNF
from ddnf.flow.linalg import inverse

_CHEAP_INVERSE = (Affine, Identity, Loc, Scale, TriangularAffine)
# Up to here the Jacobian of a bijection that we know nothing of, and its inverse, cost little.
_LARGEST_JACOBIAN = 8


def carry_score(
    bijection: AbstractBijection, x: Float[Array, " dim"], score: Float[Array, " dim"], condition: Array | None = None
) -> tuple[Float[Array, " dim"], Float[Array, ""], Float[Array, " dim"]]:
    """y, the log-determinant, and the score at y of the density with `score` at x: J^-T (score - grad log det).

    Example:
        >>> import jax.numpy as jnp
        >>> y, log_det, score = carry_score(Scale(jnp.array([2.0])), jnp.ones(1), -jnp.ones(1))
        >>> y.tolist(), score.tolist()
        ([2.0], [-0.5])
    """
    bijection = paramax.unwrap(bijection)
    if isinstance(bijection, Chain):
        total = 0.0
        for part in bijection.bijections:
            assert isinstance(part, AbstractBijection)
            x, log_det, score = carry_score(part, x, score, condition)
            total = total + log_det
        assert isinstance(total, Array)
        return x, total, score
    if isinstance(bijection, DDNF):
        return bijection.transform_with_score(x, score, condition)
    y, log_det = bijection.transform_and_log_det(x, condition)
    if isinstance(bijection, _CHEAP_INVERSE):  # with a constant log-determinant
        _, pull = jax.vjp(bijection.inverse, y)
        return y, log_det, pull(score)[0]
    jacobian = jax.jacobian(bijection.transform)(x, condition)
    change = jax.grad(lambda x: bijection.transform_and_log_det(x, condition)[1])(x)
    return y, log_det, (score - change) @ inverse(jacobian)


def carries_score(bijection: AbstractBijection) -> bool:
    """Whether `carry_score` is cheap: for `DDNF`, affine maps, any other bijection of few dimensions, and chains.

    Example:
        >>> from flowjax.bijections import Exp
        >>> carries_score(Exp((2,))), carries_score(Exp((50,)))
        (True, False)
    """
    bijection = paramax.unwrap(bijection)
    if isinstance(bijection, Chain):
        return all(isinstance(part, AbstractBijection) and carries_score(part) for part in bijection.bijections)
    return isinstance(bijection, (DDNF, *_CHEAP_INVERSE)) or bijection.shape[0] <= _LARGEST_JACOBIAN
