"""Carries the gradient of a log density through a bijection, so that path-derivative gradients need no inverse pass."""

import jax
import paramax
from flowjax.bijections import AbstractBijection, Affine, Chain, Identity, Loc, Scale, TriangularAffine
from jaxtyping import Array, Float

from ddnf.flow.bijection import DDNF

_CHEAP_INVERSE = (Affine, Identity, Loc, Scale, TriangularAffine)


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
    # These have a constant log-determinant, and an inverse that autodiff transposes.
    y, log_det = bijection.transform_and_log_det(x)
    _, pull = jax.vjp(bijection.inverse, y)
    return y, log_det, pull(score)[0]


def carries_score(bijection: AbstractBijection) -> bool:
    """Whether `carry_score` knows the bijection: `DDNF`, affine maps, and chains of them.

    Example:
        >>> from flowjax.bijections import Exp
        >>> carries_score(Identity()), carries_score(Exp())
        (True, False)
    """
    bijection = paramax.unwrap(bijection)
    if isinstance(bijection, Chain):
        return all(isinstance(part, AbstractBijection) and carries_score(part) for part in bijection.bijections)
    return isinstance(bijection, (DDNF, *_CHEAP_INVERSE))
