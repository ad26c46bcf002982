"""Posteriors in one call: a flow fitted to a density known up to a constant, and what can be said of the fit."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from os import PathLike
from threading import Thread
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection, Chain
from flowjax.distributions import StandardNormal, Transformed
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.bijection import DDNF
from ddnf.flow.parts import as_exact
from ddnf.posterior import diagnosis as judge
from ddnf.posterior.importance import psis
from ddnf.posterior.modes import LARGEST_FULL, Search, gaussians, merged
from ddnf.posterior.objective import End, Gradient, ReverseKL, best_gradient, whitening
from ddnf.posterior.summary import Summary, summarize
from ddnf.posterior.target import Target
from ddnf.training import loop as train


@dataclasses.dataclass(frozen=True)
class Posterior:
    """A fitted posterior: draws, densities, and how far to trust them.

    Attributes:
        flow: the bijection from a standard normal to the target's (unconstrained) space.
        target: what it was fitted to; None in a posterior loaded without it.
        elbo: the exact evidence lower bound, from fresh draws.
        elbo_error: its standard error.
        log_evidence: estimate of the log of the target's integral, by importance sampling.
        khat: PSIS diagnostic of the importance weights; above 0.7 do not trust the fit.
        ess: effective sample size of the importance weights, as a share of the draws.
        complaints: what was found wrong with the fit, each with what to do; empty if nothing was.
        losses: the negative ELBO over the course of training, in stretches of 100 steps.
        seconds: wall time of each of these stretches; the first of them compiles.
    """

    flow: AbstractBijection
    target: Target | None
    elbo: float
    elbo_error: float
    log_evidence: float
    khat: float
    ess: float
    complaints: tuple[str, ...]
    losses: Float[np.ndarray, " n"]
    seconds: Float[np.ndarray, " n"]

    @property
    def dim(self) -> int:
        return self.flow.shape[0]

    @property
    def distribution(self) -> Transformed:
        """The fit as a FlowJAX distribution on the unconstrained space."""
        return Transformed(StandardNormal(self.flow.shape), self.flow)

    def sample(self, key: PRNGKeyArray, n: int = 1000) -> Any:
        """n draws: arrays named as in the model, constrained; or one array (n, dim) for a plain `Target`."""
        return self._shown(self.sample_unconstrained(key, n))

    def sample_unconstrained(self, key: PRNGKeyArray, n: int = 1000) -> Float[Array, "n dim"]:
        """n draws in the unconstrained space."""
        _check_count(n)
        return judge.draw(self.flow, key, n)[0]

    def log_prob(self, z: Float[Array, "*batch dim"]) -> Float[Array, "*batch"]:
        """The fit's exact log density at points of the unconstrained space."""
        z = jnp.asarray(z)
        if z.shape[-1:] != self.flow.shape:
            raise ValueError(f"Expected points of shape (..., {self.dim}); got {z.shape}.")
        return judge.log_prob(self.distribution, z.reshape(-1, self.dim)).reshape(z.shape[:-1])

    def importance_sample(self, key: PRNGKeyArray, n: int = 1000, *, weighted: bool = False) -> Any:
        """Draws corrected by importance weights, which are Pareto-smoothed: closer to the target than `sample`.

        Args:
            n: number of draws.
            weighted: give ``(draws, weights)`` with weights that sum to 1, instead of n draws resampled from 4 n.
        """
        _check_count(n)
        key, pick = jr.split(key)
        z, log_weights = self._weighted(key, max(25, n if weighted else 4 * n))
        smoothed = psis(log_weights)
        _warn_khat(smoothed.khat)
        weights = np.exp(smoothed.log_weights)
        if weighted:
            return self._shown(z), jnp.asarray(weights)
        chosen = jr.choice(pick, len(z), (n,), p=jnp.asarray(weights))
        return self._shown(z[chosen])

    def summary(self, key: PRNGKeyArray | None = None, n: int = 4000) -> Summary:
        """Mean, deviation and quantiles of every parameter, under a line on the fit; print it or look at its rows."""
        draws = self.sample(jr.key(0) if key is None else key, n)
        return summarize(draws, dict(elbo=self.elbo, elbo_error=self.elbo_error, khat=self.khat, ess=self.ess))

    def to_arviz(self, key: PRNGKeyArray, n: int = 1000) -> Any:
        """ArviZ InferenceData (DataTree from ArviZ 1): draws, log-probabilities, log weights, and the fit's figures."""
        from ddnf.posterior.export import to_arviz

        return to_arviz(self, key, n)

    def save(self, path: str | PathLike, *, overwrite: bool = False) -> None:
        """Writes the fit to one file; see `ddnf.load`. Replaces a model; any other file only with `overwrite`."""
        from ddnf.storage.models import save

        save(path, self, overwrite=overwrite)

    def _shown(self, z):
        if self.target is None or self.target.constrain is None:
            return z
        return _constrain(self.target.constrain, z)

    def _weighted(self, key, n):
        if self.target is None:
            raise ValueError(
                "Expected a posterior with its target; got one loaded without: ddnf.load(path, target=...)."
            )
        z, log_q = judge.draw(self.flow, key, n)
        return z, judge.clean(judge.log_density(self.target.log_density, z) - log_q)


def fit_posterior(
    key: PRNGKeyArray,
    target: Target,
    *,
    flow: AbstractBijection | None = None,
    steps: int = 2500,
    batch: int = 64,
    learning_rate: float = 2e-2,
    rounds: int = 3,
    searches: int = 4,
    end: End | Literal["auto"] | None = "auto",
    gradient: Gradient | None = None,
    temper: float | None = None,
    regularizer: Callable[[AbstractBijection, Array], Array] | None = None,
    checkpoint: str | PathLike | None = None,
    progress: bool = True,
) -> Posterior:
    """Fits a flow to a target by minimizing KL(q|p): variational inference without tuning.

    A search for modes gives a Gaussian, which standardizes the target; a flow, close to the identity at first, and an
    affine map after it are trained on draws of their own. If importance weights say that the fit is not good
    enough yet, training starts anew from where it is, for `rounds` rounds at most; or from the beginning with a smaller
    learning rate, if the flow folds or has become worse than the Gaussian was. The best of the rounds is returned.

    Args:
        key: random key.
        target: a `Target`, from `from_numpyro`, `from_pymc` or a log density.
        flow: a bijection (dim,) -> (dim,) to be trained instead of the default for this dimension.
        steps: training steps of each round.
        batch: draws for each step.
        learning_rate: of Adam, at its height.
        rounds: at most so many rounds of training.
        searches: number of random starts of the search for modes.
        end: the affine map after the flow: "full" (triangular), "diagonal", "auto" (full up to 128 dimensions); or
            None: neither an affine map nor a search, the flow alone.
        gradient: "path" (path-derivative: no variance where the fit is perfect) or "total" (plain reparameterization);
            None for the first wherever the flow allows it.
        temper: share of the first round's steps in which the target is warmed up from a flat one; None for 0.3 where
            the search has found several modes, 0 otherwise.
        regularizer: added to the loss, from the flow and one draw of the standard normal, as in
            ``lambda flow, x: 0.1 * ddnf.geodesic(flow.path(x)[1])``.
        checkpoint: folder to resume from, should the run be interrupted.
        progress: whether to show bars.

    Warns if the fit is not to be trusted, and says what to do: k-hat above 0.7, folded cells, training that has not
    settled, or a mode that the fit does not cover.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr
        >>> target = ddnf.Target(lambda z: -jnp.sum(jnp.cosh(z)) - z[0] * z[1] / 2, 2)
        >>> posterior = ddnf.fit_posterior(jr.key(0), target, steps=1000, progress=False)
        >>> posterior.sample(jr.key(1), 10).shape
        (10, 2)
        >>> posterior.khat < 0.7
        True
    """
    sizes = dict(steps=steps, batch=batch, rounds=rounds, searches=searches)
    _check(target, flow, sizes, learning_rate, end, gradient, temper)
    flow_key, search_key, fit_key, judge_key = jr.split(key, 4)
    search = Search(target)
    with _aside(_make_once, target.dim, flow, end):
        modes = [] if end is None else gaussians(search_key, target, search, searches)
    flow = default_flow(flow_key, target.dim) if flow is None else flow
    whiten = None if end is None else whitening(*merged(modes)[:2], _end(end, target.dim))
    whole = start = flow if whiten is None else Chain([flow, whiten.end()])
    gradient = best_gradient(whole) if gradient is None else gradient
    temper = (0.3 if len(modes) > 1 else 0.0) if temper is None else temper
    losses, seconds, verdict = [], [], None
    judged: list[tuple[tuple[bool, bool, float], AbstractBijection, judge.Verdict]] = []

    def finish(trained):
        return as_exact(trained if whiten is None else whiten.merge(trained))

    final = finish(whole)
    ahead = [] if end is None else judge.random_starts(judge_key, target)
    for number in range(rounds):
        warm = int(temper * steps) if number == 0 else 0
        spread = jnp.asarray(1.0 if verdict is None or verdict.khat < judge.GOOD_KHAT else 1.5)
        with _aside(_prepare_judgement, judge_key, final, search, ahead):
            result = train.fit(
                jr.fold_in(fit_key, number),
                whole,
                ReverseKL(target.log_density, whiten, regularizer, batch, gradient, warm, spread),
                steps=steps,
                optimizer=train.adam(learning_rate, steps),
                checkpoint=None if checkpoint is None else f"{checkpoint}/round-{number}",
                progress=progress,
                description=f"posterior, round {number + 1}",
            )
        whole = result.parameters
        losses.append(result.losses)
        seconds.append(result.seconds)
        if result.reason == train.TOO_MANY_BAD and number < rounds - 1:
            whole, learning_rate = start, learning_rate / 10
            continue
        final = finish(whole)
        verdict = judge.judge(judge_key, final, target)
        is_sound = judge.is_sound(judge_key, final)
        judged.append(((is_sound, verdict.is_good, verdict.elbo), final, verdict))
        if verdict.is_good and is_sound:
            break
        if not is_sound or verdict.elbo < judge.judge(judge_key, finish(start), target).elbo:
            whole, learning_rate = start, learning_rate / 4
    _, final, verdict = max(judged, key=lambda found: found[0])
    course = np.concatenate(losses)
    complaints = judge.complaints(judge_key, final, target, verdict, course, search)
    for complaint in complaints:
        warnings.warn(complaint, RuntimeWarning, stacklevel=2)
    return Posterior(final, target, *verdict[:5], complaints, course, np.concatenate(seconds))


def default_flow(key: PRNGKeyArray, dim: int) -> DDNF:
    """The flow that `fit_posterior` takes where none is given."""
    if dim <= 2:
        return DDNF(key, dim, blocks=4, steps=4, hidden=(16, 16), activation="softplus")
    return DDNF(key, dim, blocks=16, steps=2, hidden=(3,), activation="softplus")


@contextlib.contextmanager
def _aside(function, *arguments):
    """Calls a function in a thread beside what is done in the context, for what it leaves compiled; it may fail."""

    precision = jnp.result_type(float) == jnp.float64  # a context may have set it, for its own thread alone

    def run():
        with contextlib.suppress(Exception), jax.enable_x64(precision):
            function(*arguments)

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _prepare_judgement(key, flow, search, starts):
    judge.warm_up(key, flow)
    for start in starts:
        search.mode_from(start)


def _make_once(dim, flow, end):
    if flow is None:
        default_flow(jr.key(0), dim)
    if end is not None:
        whitening(np.zeros(dim), np.eye(dim), _end(end, dim)).end()


def _end(end, dim) -> End:
    return ("full" if dim <= LARGEST_FULL else "diagonal") if end == "auto" else end


@eqx.filter_jit
def _constrain(constrain, z):
    return jax.vmap(constrain)(z)


def _warn_khat(khat):
    if khat > judge.KHAT:
        warnings.warn(
            f"k-hat is {khat:.2f}, above {judge.KHAT}: importance weights can't be trusted here.",
            RuntimeWarning,
            stacklevel=3,
        )


def _check_count(n):
    if n < 1:
        raise ValueError(f"Expected at least 1 draw; got {n}.")


def _check(target, flow, sizes, learning_rate, end, gradient, temper):
    if not isinstance(target, Target):
        raise ValueError(f"Expected a ddnf.Target (or from_numpyro, from_pymc); got {type(target).__name__}.")
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"Expected {name} of at least 1; got {value}.")
    if not learning_rate > 0:
        raise ValueError(f"Expected a positive learning_rate; got {learning_rate}.")
    if end not in ("auto", "full", "diagonal", None):
        raise ValueError(f"Expected end to be auto, full, diagonal or None; got {end!r}.")
    if gradient not in ("path", "total", None):
        raise ValueError(f"Expected gradient to be path, total or None; got {gradient!r}.")
    if temper is not None and not 0 <= temper <= 1:
        raise ValueError(f"Expected temper between 0 and 1; got {temper}.")
    if flow is not None:
        if not isinstance(flow, AbstractBijection):
            raise ValueError(f"Expected flow to be a FlowJAX bijection such as ddnf.DDNF; got {type(flow).__name__}.")
        if flow.shape != (target.dim,) or flow.cond_shape is not None:
            raise ValueError(f"Expected a flow of shape ({target.dim},) without condition; got {flow.shape}.")
