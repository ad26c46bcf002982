"""Does a fitted flow fold? Looks at every cell of every DDNF in it, on points."""

from typing import Any

import equinox as eqx
import jax
import paramax
from flowjax.bijections import AbstractBijection, Chain, Invert
from jaxtyping import Array, Float

from ddnf.flow.bijection import DDNF
from ddnf.flow.certificate import certify


def folded_share(
    flow: AbstractBijection, x: Float[Array, "n dim"], condition: Float[Array, "n condition"] | None = None
) -> float:
    """The share of cells that fold on the way of points through a flow; 0 where no fold was seen.

    Looks at a `DDNF`, an inverted one, and chains with them; any other bijection is taken for what it says it is.

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
        # An inverted DDNF begins where its points end.
        way = parts[: number + (inner is not part)]
        points = _after(Chain(way), x, condition) if way else x
        certificate = certify(inner, points, condition if inner.cond_shape is not None else None)
        if certificate.verdict == "folds":
            # Where only the way back failed, one cell at least is to blame.
            return max(certificate.folded_share, 1 / (x.size * inner.blocks * inner.steps))
    return 0.0


def reverse(flow: AbstractBijection | paramax.AbstractUnwrappable) -> AbstractBijection:
    """The way back, part by part: what `folded_share` can look into.

    Example:
        >>> import jax.random as jr
        >>> type(reverse(Invert(DDNF(jr.key(0), 2)))).__name__
        'DDNF'
    """
    whole: Any = paramax.unwrap(flow)
    if isinstance(whole, Invert):
        return whole.bijection
    if isinstance(whole, Chain):
        return Chain([reverse(part) for part in reversed(whole.bijections)])
    return Invert(whole)


@eqx.filter_jit
def _after(way, x, condition):
    return jax.vmap(way.transform, (0, None if condition is None else 0))(x, condition)
