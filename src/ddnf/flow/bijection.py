"""The flow: K stationary velocity fields, one after another, each integrated over unit time in T steps."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from flowjax.bijections import AbstractBijection
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ddnf.flow import hidden as hidden_units
from ddnf.flow.field import MLPField, Velocity
from ddnf.flow.lanes import over_lanes
from ddnf.flow.log_det import Exact, LogDet
from ddnf.flow.newton import SOLUTION, invert_step, solve_transposed, warn_unless
from ddnf.flow.solver import Solver, euler, expansion

Inversion = Literal["exact", "reverse"]
Recompute = Literal["cells", "segments", "nothing"]

_MOST_LANES = 1024
# Up to which rank of the field how many points are computed side by side.
_LANES = ((3, _MOST_LANES), (16, 256), (32, 128), (math.inf, 32))


class Path(eqx.Module):
    """What happened in each cell on the way of one point through the flow.

    Attributes:
        points: where each cell began.
        velocities: the field there.
        log_dets: the log-determinant of each cell, by the flow's rule.
    """

    points: Float[Array, "K T dim"]
    velocities: Float[Array, "K T dim"]
    log_dets: Float[Array, "K T"]


class DDNF(AbstractBijection):
    """A deep diffeomorphic normalizing flow: a FlowJAX bijection.

    Block k integrates dz/dt = v_k(z) over unit time in `steps` steps of dt = 1 / steps that share the field
    (the paper's stationary block); `blocks` different fields follow each other (its time-varying flow).

    Args:
        key: random key of the initial weights.
        dim: dimension of the points.
        blocks: K, the number of fields.
        steps: T, the number of steps through each field.
        hidden: widths of each field's hidden layers; one narrow layer keeps log-determinants cheap.
        condition_dim: dimension of the condition; None for a flow without.
        activation: "tanh", "softplus", "swish", "gelu" or "sin".
        context_rank: rank of the condition's update of the weights, on top of its shift and scale.
        output_scale: size of the velocities at the start; small keeps the flow near the identity.
        field: a function key -> field to use instead of an `MLPField`. A field is any callable
            ``(z, condition) -> v``; one with parameters is an Equinox module, and is stacked K times.
        solver: `euler` (the paper's), `midpoint`, `rk4`, or any function ``(velocity, z, dt) -> z_next``.
        log_det: `Exact`, `Taylor`, `PrintedTaylor`, `Divergence`, `Unbiased`, or your own `LogDet`.
        inverse: "exact" (Newton's method in each cell; NaN and a warning where it finds none) or "reverse" (the
            paper's: the same flow with -v, which inverts up to an error of O(dt)).
        lipschitz: a number below 1 *guarantees* a diffeomorphism: where the spectral bound of a step exceeds
            it, the field is slowed down to it. For `MLPField` and the solvers of this library.
        recompute: what the backward pass computes again instead of storing it: "cells" (stores one point for
            each cell; also the fastest), "segments" (stores one point for each block and
            O(steps^(1/3)) within one, for very many steps), or "nothing".

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
    solver: Solver = eqx.field(static=True)
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
        solver: Solver = euler,
        log_det: LogDet | None = None,
        inverse: Inversion = "exact",
        lipschitz: float | None = None,
        recompute: Recompute = "cells",
    ):
        mlp = eqx.Partial(
            MLPField,
            dim=dim,
            hidden=tuple(hidden),
            condition_dim=condition_dim,
            activation=activation,
            context_rank=context_rank,
            output_scale=output_scale,
        )
        log_det = Exact() if log_det is None else log_det
        _check_arguments(dim, blocks, steps, solver, log_det, inverse, lipschitz, field, recompute)
        if field is None:
            jax.eval_shape(mlp, key)  # complains of bad sizes before anything is traced
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

    def transform_and_log_det(self, x, condition=None):
        return self._run(_forward, x, condition)

    def inverse_and_log_det(self, y, condition=None):
        if self.inversion == "reverse":
            return self._run(_reverse, y, condition)
        return self._run(_inverse, y, condition, chunk=512)

    def reverse_and_log_det(self, y: Array, condition: Array | None = None) -> tuple[Array, Array]:
        """The paper's inverse whatever `inverse` says: the flow with -v, and its own log-determinant."""
        self._check_point(y, condition)
        return self._run(_reverse, jnp.asarray(y), condition)

    def with_log_det(self, log_det: LogDet) -> "DDNF":
        """The same map with another rule, such as `Exact` to judge what an approximation has trained.

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
        leaves, structure = jax.tree.flatten(self)
        other = jax.tree.unflatten(structure, leaves)
        object.__setattr__(other, "inversion", inverse)
        return other

    def transform_with_score(
        self, x: Array, score: Array, condition: Array | None = None
    ) -> tuple[Float[Array, " dim"], Float[Array, ""], Float[Array, " dim"]]:
        """Carries a point and the gradient of a log density there to the other side, exactly.

        If `score` is the gradient of log p(x), the score of the carried density is J^-T (score - grad log det).
        It goes along cell by cell, for the price of the log-determinant's gradient; with it come the path-derivative
        gradients of `ddnf.fit_posterior`. The log-determinant is the exact one, whatever the flow's rule.

        Example:
            >>> import jax.numpy as jnp, jax.random as jr
            >>> flow = DDNF(jr.key(0), 2)
            >>> x = jnp.array([0.5, -1.0])
            >>> y, log_det, score = flow.transform_with_score(x, -x)  # a standard normal, carried
            >>> score.shape
            (2,)
        """
        self._check_point(x, condition)
        return self.with_log_det(Exact())._run(_with_score, jnp.asarray(x), jnp.asarray(score), condition)

    def path(self, x: Array, condition: Array | None = None) -> tuple[Float[Array, " dim"], Path]:
        """The end of a point's way through the flow, and the way itself, with leading axes (K, T).

        Example:
            >>> import jax.numpy as jnp, jax.random as jr
            >>> end, path = DDNF(jr.key(0), 2, blocks=3, steps=4).path(jnp.ones(2))
            >>> path.points.shape, path.log_dets.shape
            ((3, 4, 2), (3, 4))
        """
        self._check_point(x, condition)
        end, visited = self._run(_path, jnp.asarray(x), condition)
        return end, Path(*visited)

    def velocity(self, field: Callable, condition: Array | None) -> Velocity | Callable:
        """One block's field at a condition, slowed down to the Lipschitz bound if there is one."""
        if isinstance(field, Velocity):
            return field
        if not isinstance(field, MLPField):
            return lambda z: field(z, condition)
        return self._bounded(field.at(condition))

    def _bounded(self, velocity: Velocity) -> Velocity:
        if self.lipschitz is None:
            return velocity
        fastest = _admissible(self.solver, self.lipschitz) / self.dt
        bound = velocity.lipschitz()
        return velocity.scaled(jnp.where(bound > fastest, fastest / jnp.where(bound > 0, bound, 1.0), 1.0))

    def _check_point(self, x, condition):
        if jnp.shape(x) != self.shape:
            raise ValueError(f"Expected input shape {self.shape}; got {jnp.shape(x)}.")
        if self.cond_shape is not None and condition is None:
            raise ValueError("Expected condition to be provided; got None.")
        if self.cond_shape is not None and jnp.shape(condition) != self.cond_shape:
            raise ValueError(f"Expected condition.shape {self.cond_shape}; got {jnp.shape(condition)}.")

    def _run(self, function, x, *others, chunk=_MOST_LANES):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"Expected floating-point input; got {x.dtype}.")
        # Points and weights of different precision meet in the higher one.
        x = x.astype(jnp.result_type(x, *jax.tree.leaves(eqx.filter(self.fields, eqx.is_inexact_array))))
        *others, condition = others
        if self.cond_shape is None:
            condition = None
        flow = self._ahead(None) if condition is None and isinstance(self.fields, MLPField) else self
        if self.takes_lanes:
            return over_lanes(function, flow, x, *others, condition, chunk=min(chunk, self._lanes))
        return function(flow, x, *others, condition)

    def _ahead(self, condition: Array | None) -> "DDNF":
        """The flow at one condition, with all that does not depend on the points computed for all blocks at once."""
        fields: MLPField = self.fields
        velocities = eqx.filter_vmap(lambda field, heard: self._bounded(field.given(heard)))(
            fields, fields.heard(condition)
        )
        return eqx.tree_at(lambda flow: flow.fields, self, velocities)

    @property
    def takes_lanes(self) -> bool:
        """Whether points may be computed side by side in trailing axes; see `ddnf.flow.lanes`."""
        is_known = isinstance(self.fields, MLPField | Velocity)
        return is_known and self.solver is euler and self.log_det.takes_lanes

    @property
    def _lanes(self) -> int:
        """How many points are computed side by side: as many as have their small matrices in the nearest caches."""
        rank = min(min(weight.shape[-2:]) for weight in self.fields.weights)
        return next(lanes for largest, lanes in _LANES if rank <= largest)


@eqx.filter_jit
def _stack(field, key, blocks):
    # Compiled as a whole: one by one, these many small operations would take longer. And one field after another,
    # which the compiler is quicker with than with all at once.
    static = eqx.filter(field(key), eqx.is_array, inverse=True)
    arrays = lax.map(lambda key: eqx.filter(field(key), eqx.is_array), jr.split(key, blocks))
    return eqx.combine(arrays, static)


def _forward(flow: DDNF, x, condition):
    def block(carry, velocity, index):
        def cell(carry, t):
            z, log_det = carry
            z, change = flow.log_det.step(flow.solver, velocity, z, dt=flow.dt, cell=index * flow.steps + t)
            return (z, log_det + change), None

        return _scan_cells(cell, carry, flow)

    return _scan_blocks(_cheapest(block, flow, 1.0), (x, jnp.zeros(x.shape[1:], x.dtype)), flow, condition)[0]


def _with_score(flow: DDNF, x, score, condition):
    def block(carry, velocity, _):
        def cell(carry, _):
            z, score, log_det = carry
            (z_next, change), pull = jax.vjp(lambda z: Exact().step(flow.solver, velocity, z, dt=flow.dt, cell=0), z)
            (gradient,) = pull((jnp.zeros_like(z), jnp.ones_like(change)))
            score = solve_transposed(flow.solver, velocity, z, score - gradient, dt=flow.dt)
            return (z_next, score, log_det + change), None

        return lax.scan(cell, carry, None, length=flow.steps)

    start = x, score.astype(x.dtype), jnp.zeros(x.shape[1:], x.dtype)
    (y, score, log_det), _ = _scan_blocks(block, start, flow, condition)
    return y, log_det, score


def _path(flow: DDNF, x, condition):
    def block(z, velocity, index):
        def cell(z, t):
            z_next, change = flow.log_det.step(flow.solver, velocity, z, dt=flow.dt, cell=index * flow.steps + t)
            return z_next, (z, velocity(z), change)

        return lax.scan(jax.checkpoint(cell, prevent_cse=False), z, jnp.arange(flow.steps))

    return _scan_blocks(block, x, flow, condition)


def _inverse(flow: DDNF, y, condition):
    def block(carry, velocity, index):
        def cell(carry, t):
            z, log_det = carry
            z = invert_step(flow.solver, velocity, z, dt=flow.dt)
            number = index * flow.steps + flow.steps - 1 - t
            _, change = flow.log_det.step(flow.solver, velocity, z, dt=flow.dt, cell=number)
            return (z, log_det - change), None

        return _scan_cells(cell, carry, flow)

    start = y, jnp.zeros(y.shape[1:], y.dtype)
    x, log_det = _scan_blocks(_cheapest(block, flow, -1.0), start, flow, condition, reverse=True)[0]
    warn_unless(jnp.all(jnp.isfinite(x) | ~jnp.isfinite(y)))
    return x, log_det


def _reverse(flow: DDNF, y, condition):
    def block(carry, velocity, index):
        backward = velocity.scaled(-1.0) if isinstance(velocity, Velocity) else lambda z: -velocity(z)

        def cell(carry, t):
            z, log_det = carry
            number = index * flow.steps + flow.steps - 1 - t
            z, change = flow.log_det.step(flow.solver, backward, z, dt=flow.dt, cell=number)
            return (z, log_det + change), None

        return _scan_cells(cell, carry, flow)

    start = y, jnp.zeros(y.shape[1:], y.dtype)
    return _scan_blocks(_cheapest(block, flow, -1.0), start, flow, condition, reverse=True)[0]


def _cheapest(block, flow: DDNF, time: float):
    """`block`, run among the hidden units of its field where that pays; `time` is 1, or -1 for a way back."""

    def run(carry, velocity, index):
        if not (flow.log_det.sees_eigenvalues_only and flow.takes_lanes and hidden_units.pays(velocity, flow.steps)):
            return block(carry, velocity, index)
        z, log_det = carry
        start = hidden_units.enter(velocity, z), log_det
        (state, log_det), visited = block(start, hidden_units.among_hidden(velocity), index)
        return (hidden_units.leave(velocity, z, state, time=time), log_det), visited

    return run


def _scan_blocks(block, carry, flow: DDNF, condition, *, reverse: bool = False):
    if condition is not None and condition.ndim > 1 and isinstance(flow.fields, MLPField):
        flow = flow._ahead(condition)
    arrays, static = eqx.partition(flow.fields, eqx.is_array)

    def body(carry, indexed):
        index, arrays = indexed
        velocity = flow.velocity(eqx.combine(arrays, static), condition)
        return block(carry, velocity, index)

    if flow.recompute == "segments":
        body = jax.checkpoint(body, prevent_cse=False)
    return lax.scan(body, carry, (jnp.arange(flow.blocks), arrays), reverse=reverse)


def _scan_cells(cell, carry, flow: DDNF):
    if flow.recompute == "nothing":
        return lax.scan(cell, carry, jnp.arange(flow.steps))
    policy = jax.checkpoint_policies.save_only_these_names(SOLUTION)
    cell = jax.checkpoint(cell, prevent_cse=False, policy=policy)
    if flow.recompute == "cells":
        return lax.scan(cell, carry, jnp.arange(flow.steps))

    return _scan_segments(cell, carry, jnp.arange(flow.steps), levels=2)


def _scan_segments(cell, carry, numbers, *, levels: int):
    """A scan in segments, and these in segments again: the backward pass keeps their beginnings alone."""
    length = round(len(numbers) ** (levels / (levels + 1)))
    if levels == 0 or len(numbers) <= 2 * length:
        return lax.scan(cell, carry, numbers)
    whole = len(numbers) // length * length

    def segment(carry, numbers):
        return _scan_segments(cell, carry, numbers, levels=levels - 1)

    carry, _ = lax.scan(jax.checkpoint(segment, prevent_cse=False), carry, numbers[:whole].reshape(-1, length))
    return segment(carry, numbers[whole:])


def _admissible(solver: Solver, bound: float) -> float:
    """The largest dt * Lipschitz constant whose step stays within `bound` of the identity, by bisection."""
    low, high = 0.0, bound
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expansion(solver, middle) <= bound else (low, middle)
    return low


def _check_arguments(dim, blocks, steps, solver: Any, log_det, inverse, lipschitz, field, recompute):
    for name, value in (("dim", dim), ("blocks", blocks), ("steps", steps)):
        if value < 1:
            raise ValueError(f"Expected {name} of at least 1; got {value}.")
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
        if field is not None or expansion(solver, 0.0) > 0:
            raise ValueError("Expected an MLPField and a solver of this library with lipschitz; got one of your own.")
