"""Affine layers of a velocity field at one condition.

A point is an array ``(n,)``. A whole batch may be computed at once as ``(n, *lanes)``, with the batch in the minor
axes: for points of few dimensions that is about twice as fast as the batch in the first axis.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Layer(eqx.Module):
    """x -> scale * ((W + U diag(g) V) x) + offset; scale and update are None where they are the identity and zero."""

    weight: Float[Array, "out in"]
    offset: Float[Array, "out *lanes"]
    scale: Float[Array, "out *lanes"] | None = None
    update: tuple[Array, Array, Array] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the weights are the same for every lane."""
        return self.scale is None and self.update is None

    def __call__(self, x: Float[Array, "in *lanes"]) -> Float[Array, "out *lanes"]:
        return plus(self.linear(x), self.offset)

    def linear(self, x: Float[Array, "in *lanes"]) -> Float[Array, "out *more"]:
        """The layer without its offset."""
        y = _product(self.weight, x)
        if self.update is not None:
            left, gate, right = self.update
            y = plus(y, _product(left, times(gate, _product(right, x))))
        return y if self.scale is None else times(self.scale, y)

    def norm(self) -> Float[Array, "*lanes"]:
        """An upper bound on the spectral norm, which is exact for a plain layer."""
        norm = spectral_norm(self.weight)
        if self.update is not None:
            left, gate, right = self.update
            norm = norm + spectral_norm(left) * _largest(gate) * spectral_norm(right)
        return norm if self.scale is None else _largest(self.scale) * norm


def spectral_norm(matrix: Float[Array, "out in"]) -> Float[Array, ""]:
    """The largest singular value, with a gradient that is finite at zero.

    The top singular vector u is held constant: d|W^T u| is the derivative of the largest singular value.

    Example:
        >>> import jax.numpy as jnp
        >>> float(spectral_norm(jnp.diag(jnp.array([1.0, 3.0]))))
        3.0
    """
    small = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    gram = jax.lax.stop_gradient(small @ small.T)
    return safe_norm(small.T @ jnp.linalg.eigh(gram)[1][:, -1])


def safe_norm(x: Float[Array, " n"]) -> Float[Array, ""]:
    """|x|_2, with gradient zero at zero.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jax.grad(safe_norm)(jnp.zeros(2)).tolist()
        [0.0, 0.0]
    """
    squared = jnp.sum(x * x)
    is_zero = squared == 0
    return jnp.where(is_zero, 0.0, jnp.sqrt(jnp.where(is_zero, 1.0, squared)))


def plus(a: Array, b: Array) -> Array:
    """a + b; a term without lanes is the same for all lanes."""
    a, b = _match(a, b)
    return a + b


def times(a: Array, b: Array) -> Array:
    """a * b; a factor without lanes is the same for all lanes."""
    a, b = _match(a, b)
    return a * b


def _match(a: Array, b: Array) -> tuple[Array, Array]:
    ndim = max(a.ndim, b.ndim)
    return a.reshape(a.shape + (1,) * (ndim - a.ndim)), b.reshape(b.shape + (1,) * (ndim - b.ndim))


def _product(matrix: Float[Array, "out in"], x: Float[Array, "in *lanes"]) -> Float[Array, "out *lanes"]:
    if x.ndim == 1:
        # As x W^T, so that `vmap` keeps the batch in front and needs no transposition.
        return jnp.tensordot(x, matrix, (0, 1))
    # A product of two matrices: its gradient has the layout of x and needs no copy.
    return (matrix @ x.reshape(len(x), -1)).reshape(-1, *x.shape[1:])


def _largest(a: Float[Array, "n *lanes"]) -> Float[Array, "*lanes"]:
    """The largest absolute value along the first axis.

    The gradient of `jnp.max` goes to the entries that equal the maximum. If a backward pass recomputes them with
    different rounding, no entry may be equal, and the gradient is NaN. Here all entries close to the maximum share it.
    """
    sizes = jnp.abs(a)
    largest = jnp.max(jax.lax.stop_gradient(sizes), axis=0)
    is_close = jax.lax.stop_gradient(sizes) > (1 - 1e-6) * largest
    mean = jnp.sum(jnp.where(is_close, sizes, 0.0), axis=0) / jnp.maximum(jnp.sum(is_close, axis=0), 1)
    return largest + mean - jax.lax.stop_gradient(mean)
