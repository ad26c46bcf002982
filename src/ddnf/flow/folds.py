"""Whether a fitted flow folds: the determinant and inverse of every cell of every DDNF in it, at given points."""

from typing import Any

import equinox as eqx
import paramax
from flowjax.bijections import AbstractBijection, Chain, Invert
from jaxtyping import Array, Float

from ddnf.flow import batch
from ddnf.flow.bijection import DDNF
from ddnf.flow.certificate import certify


def folded_share(
    flow: AbstractBijection, x: Float[Array, "n dim"], condition: Float[Array, "n condition"] | None = None
) -> float:
    """The share of cells that fold on the paths of points through a flow; 0 where no fold was seen.

    Looks at a `DDNF`, an inverted one, and chains with them; any other bijection is assumed to be invertible.

    Example:
        >>> import jax.random as jr
        >>> folded_share(DDNF(jr.key(0), 2), jr.normal(jr.key(1), (10, 2)))
        0.0
    """
    parts = paramax.unwrap(Chain([flow])).merge_chains().bijections
    for number, part in enumerate(parts):
        inner = part.bijection if isinstance(part, Invert) else part
        if not isinstance(inner, DDNF):
            continue
        # An inverted DDNF starts from the images of its points.
        before = parts[: number + (inner is not part)]
        points = _images(Chain(before), x, condition) if before else x
        certificate = certify(inner, points, condition if inner.cond_shape is not None else None)
        if certificate.verdict == "folds":
            # Where only the inverse failed, at least one cell is responsible.
            return max(certificate.folded_share, 1 / (x.size * inner.blocks * inner.steps))
    return 0.0


def reverse(flow: AbstractBijection | paramax.AbstractUnwrappable) -> AbstractBijection:
    """The inverse, part by part, so that `folded_share` can look into it.

    Example:
        >>> import jax.random as jr
        >>> type(reverse(Invert(DDNF(jr.key(0), 2)))).__name__
        'DDNF'
    """
    bijection: Any = paramax.unwrap(flow)
    if isinstance(bijection, Invert):
        return bijection.bijection
    if isinstance(bijection, Chain):
        return Chain([reverse(part) for part in reversed(bijection.bijections)])
    return Invert(bijection)


@eqx.filter_jit
def _images(bijection, x, condition):
    return batch.transform_and_log_det(bijection, x, condition)[0]
