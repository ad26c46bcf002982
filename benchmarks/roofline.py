"""The roofline: the time of the matrix products and tanh of a training step alone.

A cell with a field of L layers W_1 ... W_L on a batch of n points in d dimensions computes

- the map: W_l h for each layer and point, that is W_l times (width, n), and tanh of what comes out of all but the last;
- the Jacobian that the exact log-determinant is of: W_L D ... D W_2 (D W_1), that is, W_l for l > 1 times (width, n d)
  where the narrowest layer is the first (the determinant allows it). D, a diagonal of tanh', is no product.

The gradient has two products of the same size for each of these: one for the input, one for the weights. What an
implementation recomputes to save memory, and the elimination of the small matrices, do not count.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

from benchmarks.steps import compiled

# A product of (m, k) and (k, n).
Shape = tuple[int, int, int]


def products(dim: int, hidden: Sequence[int], batch: int) -> list[Shape]:
    """The products of the map and of the Jacobian in one cell, forward.

    Example:
        >>> products(2, (3,), 10)
        [(3, 2, 10), (2, 3, 10), (2, 3, 20)]
    """
    widths = [dim, *hidden, dim]
    layers = list(zip(widths[1:], widths[:-1], strict=True))
    shapes = [(m, k, batch) for m, k in layers]
    narrow = min(widths)
    # The determinant of the d x d matrix is that of a matrix as large as the narrowest layer: the product goes round.
    turn = widths[1:].index(narrow) + 1 if narrow < dim else 0
    ring = layers[turn:] + layers[:turn]
    return shapes + [(m, k, narrow * batch) for m, k in ring[1:]]


def backward(shape: Shape) -> list[Shape]:
    """The two products of the gradient of one product."""
    m, k, n = shape
    return [(k, m, n), (m, n, k)]


# Columns of a chunk of a batch, small enough for the caches.
CHUNK = 1024


def prepare(part: str, size: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
    """The work of `repeats` cells: "tanh", or products.

    "products" are taken in chunks that stay in the caches, "products, batch at once" are not, and "products of the map"
    leave out the Jacobian.
    """
    repeats, batch, hidden = size["repeats"], size["batch"], size["hidden"]
    if part == "tanh":
        h = jr.normal(jr.key(0), (repeats, sum(hidden), batch))
        step = compiled(jnp.tanh, h)
        return step.run, dict(compile_seconds=step.compile_seconds)
    forward = products(size["dim"], hidden, batch)
    if part == "products of the map":
        forward = forward[: len(hidden) + 1]
    longest = max(n for _, _, n in forward) if part == "products, batch at once" else CHUNK
    runs = [
        _product(shape, repeats * pieces)
        for m, k, n in forward
        for pieces in (max(1, n // longest),)
        for shape in ((m, k, n // pieces), *backward((m, k, n // pieces)))
    ]
    flops = 3 * 2 * repeats * sum(map(prod, forward))
    return lambda: [run() for run in runs], dict(flops=flops)


def _product(shape: Shape, repeats: int) -> Callable[[], Any]:
    """One product, `repeats` times in one program, each time with another factor on the smaller side."""
    m, k, n = shape
    left, right = jr.normal(jr.key(0), (m, k)), jr.normal(jr.key(1), (k, n))
    is_left = m < n
    scales = jnp.linspace(0.5, 1.0, repeats)

    def total(scales, left, right):
        # The sum keeps the compiler from dropping products, and the results out of memory.
        def add(sum_, scale):
            return sum_ + ((scale * left) @ right if is_left else left @ (scale * right)), None

        return jax.lax.scan(add, jnp.zeros((m, n)), scales)[0]

    return compiled(total, scales, left, right).run
