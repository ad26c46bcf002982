"""Rules for the log-determinant of one step of the flow.

A rule takes a step (see `ddnf.flow.step`) and returns how much it changes volume. `Exact` and `Taylor` refer to the
discrete map, `Divergence` to the underlying differential equation. With Euler's step, `Divergence` equals `Taylor(1)`.

With the increment g(z) = step(z) - z and its Jacobian X (for Euler, X = dt J), the series behind most of
them is log det(I + X) = tr X - tr X^2 / 2 + tr X^3 / 3 - ...
"""

import warnings
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ddnf.flow.solver import as_solver
from ddnf.flow.step import AbstractStep, trace

Stepped = tuple[Float[Array, "dim *lanes"], Float[Array, "*lanes"]]


class LogDet(eqx.Module):
    """A rule for the log-determinant of one step. Subclass it and implement `apply` to write your own."""

    def apply(self, step: AbstractStep, z: Array, *, cell: Int[Array, ""] | int) -> Stepped:
        """The point after the step from z, and its log-determinant by this rule. `cell` numbers the steps of a flow."""
        if type(self).step is LogDet.step:
            raise NotImplementedError(f"Expected {type(self).__name__} to have a method apply(step, z, *, cell).")
        warnings.warn(
            "A rule with a method step(solver, velocity, z, *, dt, cell) is deprecated: rename it to "
            "apply(step, z, *, cell), where step has solver, field and dt.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.step(step.solver, step.field, z, dt=step.dt, cell=cell)

    def step(self, solver: Callable, velocity: Callable, z: Array, *, dt: float, cell: Int[Array, ""] | int) -> Stepped:
        """Deprecated: ``rule.apply(solver.step(velocity, dt), z, cell=cell)``."""
        warnings.warn(
            "LogDet.step is deprecated: use apply(solver.step(velocity, dt), z, cell=cell).",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.apply(as_solver(solver).step(velocity, dt), z, cell=cell)

    @property
    def takes_lanes(self) -> bool:
        """Whether `apply` takes whole batches, ``(dim, *lanes)``, where the step does."""
        return False


class Exact(LogDet):
    """The exact log|det| of the step, for any field and solver.

    An `MLPField` with Euler's step costs one r x r determinant, r the narrowest layer (see `ddnf.flow.bound`);
    anything else the d x d determinant of the step's Jacobian.

    Example:
        >>> import jax.numpy as jnp
        >>> from ddnf import euler
        >>> z, log_det = Exact().apply(euler.step(lambda z: -z, 0.5), jnp.ones(2), cell=0)
        >>> round(float(log_det), 6)
        -1.386294
    """

    @property
    def takes_lanes(self) -> bool:
        return True

    def apply(self, step, z, *, cell) -> Stepped:
        end, _, log_abs = step.apply_and_slog_det(z)
        return end, log_abs


class _Probed(LogDet):
    """A rule that may draw random probes: `key` holds their randomness, `probes` how many (None: no probes)."""

    probes: eqx.AbstractVar[int | None]
    kind: eqx.AbstractVar[str]
    key: eqx.AbstractVar[PRNGKeyArray | None]

    @property
    def takes_lanes(self) -> bool:
        return self.probes is None

    def __check_init__(self):
        if self.probes is not None and self.probes < 1:
            raise ValueError(f"Expected probes of at least 1, or None; got {self.probes}.")
        if self.kind not in ("gaussian", "rademacher"):
            raise ValueError(f"Expected kind to be gaussian or rademacher; got {self.kind!r}.")

    def draw(self, z: Array, cell: Int[Array, ""] | int) -> Float[Array, "probes dim"]:
        """The probes of one cell: E[w w^T] = I."""
        key = jr.fold_in(self.cell_key(), cell)
        sample = jr.normal if self.kind == "gaussian" else jr.rademacher
        return sample(key, (self.probes or 1, *z.shape), dtype=z.dtype)

    def cell_key(self) -> PRNGKeyArray:
        if self.key is None:
            name = type(self).__name__
            raise ValueError(
                f"Expected a key for the probes of {name}; got None. "
                "Set one for each sample with ddnf.with_key(flow, key)."
            )
        return self.key


class Taylor(_Probed):
    """The series of log det(I + X) cut after `order` terms; its error falls as dt^(order + 1) per cell.

    Args:
        order: number of terms.
        probes: None for exact traces (cheap for an `MLPField`); M for Hutchinson's estimate of each trace by
            M probes, tr(X^k) ~ mean of w^T X^k w, Eq. (rndTrace) of the paper.
        kind: "gaussian" (the paper's) or "rademacher" probes.
        key: randomness of the probes; see `with_key`.

    Example:
        >>> import jax.numpy as jnp
        >>> from ddnf import euler
        >>> z, log_det = Taylor(2).apply(euler.step(lambda z: z, 0.5), jnp.ones(2), cell=0)
        >>> float(log_det)  # 2 (1/2 - 1/8)
        0.75
    """

    order: int
    probes: int | None
    kind: str
    key: PRNGKeyArray | None

    def __init__(
        self, order: int = 2, *, probes: int | None = None, kind: str = "gaussian", key: PRNGKeyArray | None = None
    ):
        if order < 1:
            raise ValueError(f"Expected order of at least 1; got {order}.")
        self.order, self.probes, self.kind, self.key = order, probes, kind, key

    def apply(self, step, z, *, cell) -> Stepped:
        if self.probes is None:
            tangent = step.at(z)
            return tangent.end, _series(tangent.reduced(), self.order)
        z_next, push = step.push(z)
        estimates = jax.vmap(lambda w: _probed_series(push, w, self.order))(self.draw(z, cell))
        return z_next, jnp.mean(estimates)


class PrintedTaylor(_Probed):
    """The paper's printed second order, tr X - tr(X^T X) / 2; kept to reproduce its figures.

    Erratum: Eq. (taylor) and Appendix D expand log det(I + X) as half of log det((I + X)(I + X)^T), but leave
    out a term of the second order: the square of X + X^T. With it, tr(X^T X) becomes tr(X X), which is
    `Taylor(2)`. The two agree for symmetric X only; otherwise this one's error falls as dt^2, no faster
    than that of `Taylor(1)`.

    Args:
        probes, kind, key: as for `Taylor`.

    Example:
        >>> import jax.numpy as jnp
        >>> turn = jnp.array([[0.0, -1.0], [1.0, 0.0]])
        >>> from ddnf import euler
        >>> _, log_det = PrintedTaylor().apply(euler.step(lambda z: turn @ z, 0.5), jnp.ones(2), cell=0)
        >>> float(log_det)  # the truth is log(1.25) = 0.223, Taylor(2) gives 0.25
        -0.25
    """

    probes: int | None = eqx.field(default=None, kw_only=True)
    kind: str = eqx.field(default="gaussian", kw_only=True)
    key: PRNGKeyArray | None = eqx.field(default=None, kw_only=True)

    def apply(self, step, z, *, cell) -> Stepped:
        if self.probes is None:
            tangent = step.at(z)
            return tangent.end, trace(tangent.reduced()) - tangent.square() / 2
        z_next, push = step.push(z)
        w = self.draw(z, cell)
        image = jax.vmap(push)(w)
        return z_next, jnp.mean(jnp.sum(w * image - image * image / 2, axis=-1))


class Divergence(_Probed):
    """The continuous formula d/dt log det = tr J, integrated along with z by the same solver.

    It belongs to the differential equation, not to the discrete map: with midpoint or rk4 its error against
    the equation's log-determinant falls as fast as that of z.

    Args:
        probes, kind, key: as for `Taylor`.

    Example:
        >>> import jax.numpy as jnp
        >>> from ddnf import euler
        >>> _, log_det = Divergence().apply(euler.step(lambda z: z, 0.5), jnp.ones(2), cell=0)
        >>> float(log_det)
        1.0
    """

    probes: int | None = eqx.field(default=None, kw_only=True)
    kind: str = eqx.field(default="gaussian", kw_only=True)
    key: PRNGKeyArray | None = eqx.field(default=None, kw_only=True)

    def apply(self, step, z, *, cell) -> Stepped:
        w = None if self.probes is None else self.draw(z, cell)

        def augmented(state):
            v, divergence = _divergence(step.field, state[:-1], w)
            return jnp.concatenate([v, jnp.expand_dims(divergence, 0)])

        end = step.solver(augmented, jnp.concatenate([z, jnp.zeros_like(z[:1])]), step.dt)
        return end[:-1], end[-1]


class Unbiased(_Probed):
    """An unbiased estimate of the exact log-determinant: the series, cut at random (after Residual Flows).

    The first `terms` terms are always taken; each further one with probability `keep` given the one before,
    and weighted by the inverse of its probability. Converges where |X|_2 < 1 (the Lipschitz bound of
    `ddnf.certify`); the weighted terms have a finite variance where |X|_2^2 < keep. The gradient is an
    unbiased estimate too, by the Neumann series of (I + X)^-1, and is taken through one product only.

    Args:
        terms: how many terms are always taken.
        keep: probability to go on to each further term.
        probes, kind, key: as for `Taylor`, with at least one probe.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> from ddnf import euler
        >>> rule = Unbiased(probes=1000, key=jr.key(0))
        >>> _, log_det = rule.apply(euler.step(lambda z: z, 0.25), jnp.ones(2), cell=0)
        >>> bool(abs(log_det - 2 * jnp.log(1.25)) < 0.05)
        True
    """

    terms: int
    keep: float
    probes: int | None
    kind: str
    key: PRNGKeyArray | None

    def __init__(
        self,
        *,
        terms: int = 4,
        keep: float = 0.5,
        probes: int = 1,
        kind: str = "gaussian",
        key: PRNGKeyArray | None = None,
    ):
        if terms < 1:
            raise ValueError(f"Expected terms of at least 1; got {terms}.")
        if not 0 < keep < 1:
            raise ValueError(f"Expected keep between 0 and 1; got {keep}.")
        self.terms, self.keep = terms, keep
        self.probes, self.kind, self.key = probes, kind, key

    @property
    def takes_lanes(self) -> bool:
        return False

    def apply(self, step, z, *, cell) -> Stepped:
        z_next, push = step.push(z)
        w = self.draw(z, cell)
        length_key = jr.fold_in(jr.fold_in(self.cell_key(), cell), 1)
        extra = jr.geometric(length_key, 1 - self.keep, (len(w),), dtype=jnp.int32) - 1
        return z_next, jnp.mean(jax.vmap(lambda w, n: self._estimate(push, w, self.terms + n))(w, extra))

    def _estimate(self, push, w, count):
        frozen = _constant(push, w)
        pull = jax.linear_transpose(frozen, w)

        def weight(k):  # of the term with k + 1 factors X, given that it was reached
            return (-1.0) ** k / self.keep ** jnp.maximum(k + 1 - self.terms, 0)

        def body(state):
            k, power, back, value, adjoint = state
            value = value + weight(k) / (k + 1) * jnp.sum(w * power)
            adjoint = adjoint + weight(k) * back
            return k + 1, frozen(power), pull(back)[0], value, adjoint

        start = (jnp.zeros((), w.dtype), frozen(w), w, jnp.zeros((), w.dtype), jnp.zeros_like(w))
        *_, value, adjoint = lax.while_loop(lambda s: s[0] < count, body, start)
        # d log det(I + X) = tr((I + X)^-1 dX), estimated by adjoint^T dX w.
        surrogate = jnp.sum(lax.stop_gradient(adjoint) * push(w))
        return lax.stop_gradient(value) + surrogate - lax.stop_gradient(surrogate)


def has_probes(tree) -> bool:
    """Whether any rule in a tree draws random probes.

    Example:
        >>> has_probes(Taylor(2, probes=1)), has_probes(Exact())
        (True, False)
    """
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, _Probed))
    return any(isinstance(node, _Probed) and node.probes is not None for node in nodes)


def with_key(tree, key: PRNGKeyArray):
    """`tree` with a new key for its random probes; a no-op if it has none.

    Probes must differ between samples, so call this inside the function that is vmapped over samples.

    Example:
        >>> import jax, jax.random as jr
        >>> from ddnf import DDNF, Taylor
        >>> flow = DDNF(jr.key(0), 2, log_det=Taylor(2, probes=1))
        >>> def sample(key, x):
        ...     return with_key(flow, key).transform_and_log_det(x)
        >>> y, log_det = jax.vmap(sample)(jr.split(jr.key(1), 5), jr.normal(jr.key(2), (5, 2)))
        >>> log_det.shape
        (5,)
    """
    nodes, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, _Probed))
    for i, node in enumerate(nodes):
        if isinstance(node, _Probed) and node.probes is not None:
            nodes[i] = eqx.tree_at(lambda n: n.key, node, jr.fold_in(key, i), is_leaf=lambda k: k is None)
    return jax.tree.unflatten(structure, nodes)


def _series(x: Float[Array, "n n *lanes"], order: int) -> Float[Array, "*lanes"]:
    total, power, transposed = trace(x), x, jnp.swapaxes(x, 0, 1)
    for k in range(2, order + 1):
        total = total - (-1) ** k / k * jnp.sum(power * transposed, axis=(0, 1))
        if k < order:
            power = jnp.einsum("ij...,jk...->ik...", power, x)
    return total


def _probed_series(push, w, order):
    total, power = 0.0, w
    for k in range(1, order + 1):
        power = push(power)
        total = total - (-1) ** k / k * jnp.sum(w * power)
    return total


def _constant(push, w):
    """`push` with all that it has closed over held constant under differentiation."""
    closed, constants = jax.closure_convert(push, w)
    constants = lax.stop_gradient(constants)
    return lambda x: closed(x, *constants)


def _divergence(field, z, w):
    """v(z) and tr J(z), by probes w where there are any."""
    if w is None:
        return field.divergence(z)
    v, push = jax.linearize(field, z)
    return v, jnp.mean(jnp.sum(w * jax.vmap(push)(w), axis=-1))
