"""The flow: K stationary velocity fields, one after another, each integrated over unit time in T steps."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ddnf.flow import integrate
from ddnf.flow.batch import BatchedBijection, run_lanes
from ddnf.flow.field import MLPField, as_field, check_field
from ddnf.flow.log_det import Exact, LogDet
from ddnf.flow.solver import Solver, as_solver, euler
from ddnf.flow.step import AbstractBoundField
from ddnf.system.checks import check_count, check_key

Inversion = Literal["exact", "reverse"]
Recompute = Literal["cells", "segments", "nothing"]

# On a CPU: (rank of the field, number of points computed at a time), such that the small matrices of all points fit
# into the nearest caches.
_CHUNKS = ((3, 1024), (16, 256), (32, 128), (math.inf, 32))
# Newton iterations run until the slowest point of a chunk has converged.
_LARGEST_INVERSE_CHUNK = 512


class Path(eqx.Module):
    """The path of one point through the cells of a flow.

    Attributes:
        points: the point before each cell.
        velocities: the velocity at these points.
        log_dets: the log-determinant of each cell, by the flow's rule.
    """

    points: Float[Array, "K T dim"]
    velocities: Float[Array, "K T dim"]
    log_dets: Float[Array, "K T"]


class DDNF(BatchedBijection):
    """A deep diffeomorphic normalizing flow: a FlowJAX bijection.

    Block k integrates dz/dt = v_k(z) over unit time in `steps` steps of dt = 1 / steps that share the field
    (the paper's stationary block); `blocks` different fields follow each other (its time-varying flow).

    Args:
        key: random key of the initial weights.
        dim: dimension of the points.
        blocks: K, the number of fields.
        steps: T, the number of steps through each field.
        hidden: widths of each field's hidden layers; one narrow layer keeps log-determinants cheap.
        condition_dim: dimension of the condition; None for an unconditional flow.
        activation: "tanh", "softplus", "swish", "gelu" or "sin".
        context_rank: rank of the condition's update of the weights, on top of its shift and scale.
        output_scale: size of the initial velocities; a small value keeps the flow near the identity.
        field: a function key -> field to use instead of an `MLPField`. A field is any callable
            ``(z, condition) -> v``; one with parameters is an Equinox module, and is stacked K times.
        solver: `euler` (the paper's), `midpoint`, `rk4`, or any function ``(velocity, z, dt) -> z_next``.
        log_det: `Exact`, `Taylor`, `PrintedTaylor`, `Divergence`, `Unbiased`, or your own `LogDet`.
        inverse: "exact" (Newton's method in each cell; returns NaN and warns if it does not converge) or "reverse"
            (the paper's: the same flow with -v, which has an error of O(dt)).
        lipschitz: a number below 1 *guarantees* a diffeomorphism: if the spectral bound of a step exceeds it, the
            field is scaled down. Supported for `MLPField` and the solvers of this library.
        recompute: what the backward pass recomputes instead of storing: "cells" (stores one point per cell; also the
            fastest), "segments" (stores one point per block and O(steps^(1/3)) within a block, for very many steps),
            or "nothing".

    Example:
        >>> import jax, jax.numpy as jnp, jax.random as jr
        >>> flow = DDNF(jr.key(0), 2, blocks=3, steps=4, output_scale=1.0)
        >>> x = jnp.array([0.5, -1.0])
        >>> y, log_det = flow.transform_and_log_det(x)
        >>> bool(jnp.allclose(flow.inverse(y), x, atol=1e-5))
        True
        >>> jax.vmap(flow.transform)(jnp.ones((7, 2))).shape
        (7, 2)
    """

    fields: PyTree
    log_det: LogDet
    shape: tuple[int, ...] = eqx.field(static=True)
    cond_shape: tuple[int, ...] | None = eqx.field(static=True)
    blocks: int = eqx.field(static=True)
    steps: int = eqx.field(static=True)
    solver: Callable = eqx.field(static=True)
    inversion: Inversion = eqx.field(static=True)
    lipschitz: float | None = eqx.field(static=True)
    recompute: Recompute = eqx.field(static=True)

    def __init__(
        self,
        key: PRNGKeyArray,
        dim: int,
        *,
        blocks: int = 4,
        steps: int = 8,
        hidden: Sequence[int] = (16, 16),
        condition_dim: int | None = None,
        activation: str = "tanh",
        context_rank: int = 0,
        output_scale: float = 0.01,
        field: Callable[[PRNGKeyArray], Callable] | None = None,
        solver: Callable = euler,
        log_det: LogDet | None = None,
        inverse: Inversion = "exact",
        lipschitz: float | None = None,
        recompute: Recompute = "cells",
    ):
        mlp = eqx.Partial(
            MLPField,
            dim=dim,
            hidden=hidden,
            condition_dim=condition_dim,
            activation=activation,
            context_rank=context_rank,
            output_scale=output_scale,
        )
        check_key(key)
        log_det = Exact() if log_det is None else log_det
        _check_arguments(dim, blocks, steps, solver, log_det, inverse, lipschitz, field, recompute)
        if field is None:
            jax.eval_shape(mlp, key)  # raises for bad sizes before anything is compiled
        else:
            check_field(field, key, dim, condition_dim)
        self.fields = _stack(mlp if field is None else field, key, blocks)
        self.log_det = log_det
        self.shape = (dim,)
        self.cond_shape = None if condition_dim is None else (condition_dim,)
        self.blocks = blocks
        self.steps = steps
        self.solver = solver
        self.inversion = inverse
        self.lipschitz = lipschitz
        self.recompute = recompute

    @property
    def dt(self) -> float:
        """The time of one step."""
        return 1 / self.steps

    @property
    def method(self) -> Solver:
        """The solver, with its step and Lipschitz bound."""
        return as_solver(self.solver)

    def transform_and_log_det(self, x, condition=None):
        return self._on_point(integrate.forward, condition, x)

    def inverse_and_log_det(self, y, condition=None):
        return self._on_point(self._inverse_pass, condition, y)

    def reverse_and_log_det(self, y: Array, condition: Array | None = None) -> tuple[Array, Array]:
        """The paper's inverse, whatever the `inverse` of this flow: the flow with -v, and its log-determinant."""
        self._check_point(y, condition)
        return self._on_point(integrate.reverse, condition, jnp.asarray(y))

    def batch_transform_and_log_det(
        self, x: Float[Array, "n dim"], condition: Float[Array, "..."] | None = None
    ) -> tuple[Float[Array, "n dim"], Float[Array, " n"]]:
        """`transform_and_log_det` of every row of x: the same values as by `jax.vmap`, up to twice as fast.

        Args:
            x: points, one in each row.
            condition: one condition for all points, or one for each.

        Example:
            >>> import jax.random as jr
            >>> flow = DDNF(jr.key(0), 2)
            >>> y, log_det = flow.batch_transform_and_log_det(jr.normal(jr.key(1), (100, 2)))
            >>> y.shape, log_det.shape
            ((100, 2), (100,))
        """
        return self._on_batch(integrate.forward, condition, x)

    def batch_transform(
        self, x: Float[Array, "n dim"], condition: Float[Array, "..."] | None = None
    ) -> Float[Array, "n dim"]:
        """`transform` of every row of x, without log-determinants; see `batch_transform_and_log_det`."""
        return self._on_batch(integrate.points, condition, x)

    def batch_inverse_and_log_det(
        self, y: Float[Array, "n dim"], condition: Float[Array, "..."] | None = None
    ) -> tuple[Float[Array, "n dim"], Float[Array, " n"]]:
        """`inverse_and_log_det` of every row of y; see `batch_transform_and_log_det`."""
        return self._on_batch(self._inverse_pass, condition, y, chunk=_LARGEST_INVERSE_CHUNK)

    def batch_transform_with_score(
        self, x: Float[Array, "n dim"], score: Float[Array, "n dim"], condition: Float[Array, "..."] | None = None
    ) -> tuple[Float[Array, "n dim"], Float[Array, " n"], Float[Array, "n dim"]]:
        """`transform_with_score` of every row of x; see `batch_transform_and_log_det`."""
        return self.with_log_det(Exact())._on_batch(integrate.with_score, condition, x, score)

    def with_log_det(self, log_det: LogDet) -> "DDNF":
        """The same map with another rule, such as `Exact` to evaluate a flow that was trained with an approximation.

        Example:
            >>> import jax.numpy as jnp, jax.random as jr
            >>> from ddnf import Taylor
            >>> flow = DDNF(jr.key(0), 2, log_det=Taylor(1))
            >>> flow.with_log_det(Exact()).log_det
            Exact()
        """
        return eqx.tree_at(lambda f: f.log_det, self, log_det, is_leaf=lambda node: isinstance(node, LogDet))

    def with_inverse(self, inverse: Inversion) -> "DDNF":
        """The same map with another inverse: "exact" or "reverse".

        Example:
            >>> import jax.random as jr
            >>> DDNF(jr.key(0), 2, inverse="reverse").with_inverse("exact").inversion
            'exact'
        """
        return self._with(inversion=inverse)

    def with_steps(self, steps: int) -> "DDNF":
        """The same fields, integrated with another number of steps. Use more steps for a flow that folds.

        Example:
            >>> import jax.random as jr
            >>> DDNF(jr.key(0), 2, steps=2).with_steps(4).steps
            4
        """
        check_count(steps=steps)
        return self._with(steps=steps)

    def _with(self, **fields) -> "DDNF":
        leaves, structure = jax.tree.flatten(self)
        other = jax.tree.unflatten(structure, leaves)
        for name, value in fields.items():
            object.__setattr__(other, name, value)
        return other

    def transform_with_score(
        self, x: Array, score: Array, condition: Array | None = None
    ) -> tuple[Float[Array, " dim"], Float[Array, ""], Float[Array, " dim"]]:
        """Transforms a point and the gradient of a log density at this point, exactly.

        If `score` is the gradient of log p(x), the score of the transformed density is J^-T (score - grad log det).
        It is propagated cell by cell, at the cost of the log-determinant's gradient. The path gradients of
        `ddnf.fit_posterior` need it. The log-determinant is always the exact one.

        Example:
            >>> import jax.numpy as jnp, jax.random as jr
            >>> flow = DDNF(jr.key(0), 2)
            >>> x = jnp.array([0.5, -1.0])
            >>> y, log_det, score = flow.transform_with_score(x, -x)  # a standard normal, carried
            >>> score.shape
            (2,)
        """
        self._check_point(x, condition)
        exact = self.with_log_det(Exact())
        return exact._on_point(integrate.with_score, condition, jnp.asarray(x), jnp.asarray(score))

    def path(self, x: Array, condition: Array | None = None) -> tuple[Float[Array, " dim"], Path]:
        """The end of a point's path through the flow, and the path itself, with leading axes (K, T).

        Example:
            >>> import jax.numpy as jnp, jax.random as jr
            >>> end, path = DDNF(jr.key(0), 2, blocks=3, steps=4).path(jnp.ones(2))
            >>> path.points.shape, path.log_dets.shape
            ((3, 4, 2), (3, 4))
        """
        self._check_point(x, condition)
        end, cells = self._on_point(integrate.path, condition, jnp.asarray(x))
        return end, Path(*cells)

    def bind(self, condition: Float[Array, "condition *lanes"] | None = None) -> AbstractBoundField:
        """All K fields at one condition, slowed down to the Lipschitz bound if there is one; arrays have a leading K.

        Example:
            >>> import jax.random as jr
            >>> DDNF(jr.key(0), 2, hidden=(5,), blocks=3).bind().layers[0].weight.shape
            (3, 5, 2)
        """
        bound = as_field(self.fields).bind_stack(condition, self.blocks)
        if self.lipschitz is None:
            return bound
        limit = _admissible(self.method, self.lipschitz) / self.dt
        return eqx.filter_vmap(lambda field: field.slowed_to(limit))(bound)

    @property
    def _inverse_pass(self) -> Callable:
        return integrate.inverse if self.inversion == "exact" else integrate.reverse

    def _on_point(self, run: Callable, condition, *points):
        points, condition = self._prepare(points, condition)
        return run(self, self.bind(condition), *points)

    def _on_batch(self, run: Callable, condition, *points, chunk=None):
        points, condition = self._prepare(tuple(map(jnp.asarray, points)), condition)
        self._check_batch(points, condition)
        is_shared = condition is None or condition.ndim == 1
        field = as_field(self.fields)
        if not (field.takes_lanes and self.method.is_euler and self.log_det.takes_lanes):
            axes = (None if is_shared else 0, *(0 for _ in points))
            return jax.vmap(lambda c, *points: run(self, self.bind(c), *points), axes)(condition, *points)
        size = next(size for rank, size in _CHUNKS if field.rank <= rank)
        size = size if chunk is None else min(size, chunk)
        if is_shared:
            bound = self.bind(condition)
            return run_lanes(lambda points: run(self, bound, *points), points, chunk=size)
        return run_lanes(lambda lanes: run(self, self.bind(lanes[0]), *lanes[1:]), (condition, *points), chunk=size)

    def _prepare(self, points, condition):
        x, *others = points
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"Expected floating-point input; got {x.dtype}.")
        # Points and weights of different precision meet in the higher one.
        x = x.astype(jnp.result_type(x, *jax.tree.leaves(eqx.filter(self.fields, eqx.is_inexact_array))))
        return (x, *others), None if self.cond_shape is None else condition

    def _check_point(self, x, condition):
        if jnp.shape(x) != self.shape:
            raise ValueError(f"Expected input shape {self.shape}; got {jnp.shape(x)}.")
        if self.cond_shape is not None and condition is None:
            raise ValueError("Expected condition to be provided; got None.")
        if self.cond_shape is not None and jnp.shape(condition) != self.cond_shape:
            raise ValueError(f"Expected condition.shape {self.cond_shape}; got {jnp.shape(condition)}.")

    def _check_batch(self, points, condition):
        count = len(points[0]) if points[0].ndim else 0
        for x in points:
            if x.shape != (count, *self.shape):
                raise ValueError(f"Expected points of shape (n, {self.shape[0]}); got {x.shape}.")
        if self.cond_shape is None:
            return
        if condition is None:
            raise ValueError("Expected condition to be provided; got None.")
        if condition.shape not in (self.cond_shape, (count, *self.cond_shape)):
            raise ValueError(
                f"Expected condition of shape {self.cond_shape}, or one for each of {count} points; "
                f"got {condition.shape}."
            )


@eqx.filter_jit
def _stack(field, key, blocks):
    # Compiled as one program, because the many small operations would each compile. The fields are built one after
    # another, which compiles faster than all at once.
    static = eqx.filter(field(key), eqx.is_array, inverse=True)
    arrays = lax.map(lambda key: eqx.filter(field(key), eqx.is_array), jr.split(key, blocks))
    return eqx.combine(arrays, static)


def _admissible(solver: Solver, bound: float) -> float:
    """The largest dt * Lipschitz constant whose step stays within `bound` of the identity, by bisection."""
    low, high = 0.0, bound
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if solver.expansion(middle) <= bound else (low, middle)
    return low


def _check_arguments(dim, blocks, steps, solver: Any, log_det, inverse, lipschitz, field, recompute):
    check_count(dim=dim, blocks=blocks, steps=steps)
    if not callable(solver):
        raise ValueError(f"Expected solver to be ddnf.euler, midpoint, rk4 or a function like them; got {solver!r}.")
    if not isinstance(log_det, LogDet):
        raise ValueError(f"Expected log_det to be a rule such as ddnf.Exact(); got {log_det!r}.")
    if inverse not in ("exact", "reverse"):
        raise ValueError(f"Expected inverse to be exact or reverse; got {inverse!r}.")
    if recompute not in ("cells", "segments", "nothing"):
        raise ValueError(f"Expected recompute to be cells, segments or nothing; got {recompute!r}.")
    if lipschitz is not None:
        if not 0 < lipschitz < 1:
            raise ValueError(f"Expected lipschitz between 0 and 1; got {lipschitz}.")
        if field is not None or as_solver(solver).expansion(0.0) > 0:
            raise ValueError("Expected an MLPField and a solver of this library with lipschitz; got a custom one.")
