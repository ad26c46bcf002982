"""The cost of a log density, counted in its program, so that budgets are the same on every machine."""

import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array

# Overhead of one operation, in arithmetic operations. Outside loops, many operations share it.
_START, _START_IN_LOOP = 30, 300
# Assumed iterations of a loop with an unknown trip count.
_UNKNOWN = 1000
# Operations that chains without a flow may take.
_MOST_OPERATIONS = 2e12
# Operations that take a product of each result with a row or column.
_CUBIC = ("cholesky", "triangular_solve", "lu", "eigh", "svd", "householder_product")


def operations(log_density: Callable[[Array], Array], dim: int) -> float:
    """An estimate of the arithmetic operations of a log density at one point.

    Example:
        >>> operations(lambda z: jnp.sum(z**2), 10) < operations(lambda z: jnp.sum(jnp.outer(z, z)), 10)
        True
    """
    return _count(jax.make_jaxpr(log_density)(jax.ShapeDtypeStruct((dim,), jnp.result_type(float))).jaxpr)


def affordable_gradients(log_density: Callable[[Array], Array], dim: int) -> float:
    """Gradient evaluations that chains without a flow may take, by the cost of the target."""
    # The momenta and the affine map need products with triangular matrices.
    return _MOST_OPERATIONS / (operations(log_density, dim) + 6 * dim**2)


def largest(jaxpr) -> int:
    """The number of elements of the largest array that a program computes."""
    return max((math.prod(shape) for shape in shapes(jaxpr)), default=1)


def shapes(jaxpr) -> Iterator[tuple[int, ...]]:
    """The shapes of all arrays that a program computes."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars if hasattr(variable.aval, "shape"))
        for inner in _inside(equation.params.values()):
            yield from shapes(inner)


def _count(jaxpr, start: int = _START) -> float:
    return float(sum(_of(equation, start) for equation in jaxpr.eqns))


def _of(equation, start: int) -> float:
    name = equation.primitive.name
    inside = list(_inside(equation.params.values()))
    if inside and name in ("scan", "while"):
        times = equation.params["length"] if name == "scan" else _UNKNOWN
        return float(times) * sum(_count(jaxpr, _START_IN_LOOP) for jaxpr in inside)
    if inside:
        return float(sum(_count(jaxpr, start) for jaxpr in inside))
    size = sum(math.prod(variable.aval.shape) for variable in equation.outvars)
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        size *= 2 * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    elif name in _CUBIC:
        size *= max(equation.outvars[0].aval.shape, default=1)
    return float(start + size)


def _inside(values):
    """The programs among the parameters of an operation."""
    for value in values:
        for part in value if isinstance(value, tuple | list) else [value]:
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield inner
