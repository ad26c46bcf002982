"""Exact draws: Markov chains through a fitted flow, run until they have converged.

32 chains start from draws of the flow, resampled by importance weights. They run several times with increasing length,
each time with fixed settings, followed by a convergence check. Until the chains agree, a run is only used to tune the
next one, and is dropped. Then the run is extended until it has converged and is long enough.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Bool, Float, PRNGKeyArray
from tqdm.auto import tqdm

from ddnf.posterior.convergence import Convergence, convergence
from ddnf.posterior.cost import affordable_gradients
from ddnf.posterior.diagnosis import KHAT
from ddnf.posterior.evaluate import LostFitError
from ddnf.posterior.hmc import (
    CHUNK,
    SMALL_SHARE,
    Kernel,
    Position,
    Space,
    Trace,
    initial_kernel,
    nowhere,
    place,
    run,
    shrunk_moments,
    with_moments,
)
from ddnf.posterior.warmup import Warm

CHAINS = 32
RHAT = 1.01
# Limit for the log weights, which mix more slowly than most parameters.
WEIGHTS_RHAT = 1.03
# Effective draws below which quantiles are too noisy to report.
LEAST_ESS = 400
_ENOUGH_ESS = 4000
# Effective draws at the end of the budget, at the present rate, below which a trial is given up.
_LEAST_PROJECTED = 1000
# R-hat below which chains agree, so that a run is extended; and R-hat above which they are far apart.
MET = 1.1
_APART = 1.2
_LONGEST = 256
# Share of divergent trajectories above which the target acceptance is raised, up to a limit, so that steps get smaller.
FEW_DIVERGENCES = 0.005
_HIGHEST_TARGET = 0.97
# Number of evenly spaced draws per chain that convergence is computed from.
_JUDGED = 500
_TUNING = 2
_RUNS = 10
# Gradient evaluations after which a run that has not converged is the last one.
_MOST_GRADIENTS = 2_000_000
# The same for chains without a flow on a cheap target, at most (see `affordable_gradients`).
MOST_CHEAP = 16_000_000
# Gradient evaluations of a trial whose chains stay far apart, or a share of all that are affordable.
_TRIAL_GRADIENTS, _TRIAL_SHARE = 500_000, 4
# Share of transitions with a proposal from a flow that misses part of the target: its ESS, within these limits. With
# more, chains would mostly hold draws of the flow before they reach what it misses.
_RARE_JUMPS = 0.1, 0.5
# Transitions of such chains, unless these take more gradients than a trial. They enter the far tails slowly.
_LEAST_TRANSITIONS = 1500


@dataclasses.dataclass(frozen=True)
class Chains:
    """Draws of Markov chains, their diagnostics, and the state needed to continue them.

    Attributes:
        z: draws in the unconstrained space.
        log_weights: log p - log q at the draws, of the target and the flow.
        convergence: R-hat and effective sample sizes of every coordinate of z.
        acceptance: mean acceptance of Hamiltonian trajectories.
        flow_acceptance: share of the flow's own proposals that were accepted.
        divergences: number of divergent trajectories, of all transitions.
        narrow: share of divergent ones among the trajectories with small steps.
        divergent: whether the trajectory of the last transition before a draw was divergent.
        weights_convergence: the same figures of the log weights: chains that stay for long where p / q is large show it
            here, even where no parameter does.
        thin: transitions between two draws.
        gradients: gradient evaluations, tuning included.
        kernel, position: settings of the chains and their last points.
    """

    z: Float[np.ndarray, "chains draws dim"]
    log_weights: Float[np.ndarray, "chains draws"]
    convergence: Convergence
    acceptance: float
    flow_acceptance: float
    divergences: int
    narrow: float
    divergent: Bool[np.ndarray, "chains draws"]
    weights_convergence: Convergence
    thin: int
    gradients: int
    kernel: Kernel
    position: Position

    @property
    def rhat(self) -> float:
        """The largest R-hat."""
        return float(self.convergence.rhat.max())

    @property
    def ess(self) -> float:
        """The smallest effective sample size, of bulk and tails."""
        return float(min(self.convergence.ess_bulk.min(), self.convergence.ess_tail.min()))

    @property
    def has_few_divergences(self) -> bool:
        """Whether hardly any trajectory diverged in a region narrower than its steps."""
        return self.divergences <= FEW_DIVERGENCES * self.z.shape[0] * self.z.shape[1] * self.thin

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and triangular root of the covariance of the later half of the draws."""
        mean, _, scale = shrunk_moments(self.z[:, self.z.shape[1] // 2 :], self.ess)
        return mean, scale

    @property
    def is_converged(self) -> bool:
        return _is_converged(self.convergence, self.weights_convergence)

    def is_slow(self, khat: float) -> bool:
        """Whether the chains ran out of budget with a flow that misses part of the target, which they may miss too."""
        return self.ess < _ENOUGH_ESS and khat > KHAT


class _Run(NamedTuple):
    """One run with fixed settings: its transitions (a `Trace` of NumPy arrays, chains first) and its convergence."""

    trace: Any
    convergence: Convergence
    weights_convergence: Convergence
    length: int

    @property
    def transitions(self) -> int:
        return self.trace.z.shape[1]

    @property
    def ess(self) -> float:
        return float(min(self.convergence.ess_bulk.min(), self.convergence.ess_tail.min()))

    @property
    def is_converged(self) -> bool:
        return _is_converged(self.convergence, self.weights_convergence)

    @property
    def efficiency(self) -> float:
        """Effective draws of slow coordinates, for each gradient of a chain.

        Does not use the slowest coordinate, which is often stuck: few transitions tell little about it at any length.
        """
        return float(np.quantile(self.convergence.ess_bulk, 0.1)) / (self.transitions * (self.length + 1))


def run_polish(
    key: PRNGKeyArray,
    space: Space,
    *,
    draws: int,
    progress: bool,
    khat: float = 0.0,
    ess: float = 0.0,
    is_trial: bool = False,
    has_flow: bool = True,
    warm: Warm | None = None,
) -> Chains:
    """Runs chains until they have converged and have `_ENOUGH_ESS` effective draws, or the budget is spent.

    They start from draws of the flow, or from warmed-up chains in similar coordinates.

    A trial has a smaller budget while the chains are far apart, and ends if they are still far apart after tuning.
    """
    start_key, run_key = jr.split(key)
    jumps, least = (float(np.clip(ess, *_RARE_JUMPS)), _LEAST_TRANSITIONS) if khat > KHAT else (1.0, 0)
    kernel = initial_kernel(space.flow.shape[0], jumps)
    if warm is None:
        position = _start(start_key, space, kernel)
    else:
        position = place(space, jnp.asarray(warm.z))
        kernel = kernel._replace(log_step=warm.kernel.log_step, length=warm.kernel.length)
    most = _MOST_GRADIENTS
    if not has_flow:
        most = int(np.clip(affordable_gradients(space.log_density, space.flow.shape[0]), _MOST_GRADIENTS, MOST_CHEAP))
    lengths: dict[int, float] = {}
    spent, transitions, latest, is_settled = CHAINS * CHUNK, 2 * CHUNK, None, False
    with tqdm(total=_RUNS, desc="posterior, polish", disable=not progress, unit="run") as bar:
        for number in range(_RUNS):
            is_tuning = number < _TUNING
            if not is_settled:
                kernel, position = _tuned(jr.fold_in(run_key, 2 * number), space, kernel, position)
                spent += CHUNK * CHAINS * (int(kernel.length) + 1)
            new, position = _run(jr.fold_in(run_key, 2 * number + 1), space, kernel, position, transitions)
            spent += transitions * CHAINS * (new.length + 1)
            latest = new if not is_settled or latest is None else _joined(latest, new)
            bar.update()
            bar.set_postfix_str(f"R-hat {latest.convergence.rhat.max():.3f}, ESS {latest.ess:.0f}")
            is_apart = latest.convergence.rhat.max() > _APART
            if not is_apart:
                # Chains that are apart count as one draw each, however long they are.
                lengths[latest.length] = latest.efficiency
            is_best = latest.length == max(lengths, key=lambda length: lengths[length], default=0)
            is_met = bool(latest.convergence.rhat.max() < MET)
            is_settled = is_met and (is_settled or (is_best and not is_tuning and not _is_rough(latest, kernel)))
            following = kernel if is_settled else _retuned(kernel, latest, lengths, is_tuning)
            budget = max(_TRIAL_GRADIENTS, most // _TRIAL_SHARE) if is_trial and is_apart else most
            left = (budget - spent) // (CHAINS * (int(following.length) + 1)) // CHUNK * CHUNK
            # A run shorter than this one would not be better, unless it is extended.
            is_last = left < (CHUNK if is_settled else latest.transitions) or number == _RUNS - 1
            is_stuck = is_apart and number >= _TUNING + 2 * (warm is not None)
            is_slow = not is_tuning and not is_apart and latest.ess * (1 + left / latest.transitions) < _LEAST_PROJECTED
            is_thorough = latest.transitions >= least or spent >= _TRIAL_GRADIENTS
            is_enough = latest.is_converged and latest.ess >= _ENOUGH_ESS and is_thorough
            if is_enough or is_last or (is_trial and (is_stuck or is_slow)):
                break
            kernel, transitions = following, min(_next_transitions(latest, is_tuning, is_settled, least), left)
    assert latest is not None
    return _thinned(latest, kernel, position, draws, spent)


def continue_chains(key: PRNGKeyArray, space: Space, chains: Chains, draws: int) -> Float[np.ndarray, "n dim"]:
    """Further draws from the end points of the chains."""
    count = -(-draws // CHAINS) * chains.thin
    latest, _ = _run(key, space, chains.kernel, chains.position, -(-count // CHUNK) * CHUNK)
    z = latest.trace.z[:, chains.thin - 1 :: chains.thin]
    return np.swapaxes(z, 0, 1).reshape(-1, z.shape[-1])[:draws]


def _start(key, space: Space, kernel: Kernel) -> Position:
    """Chains at draws of the flow, after `CHUNK` steps of independence Metropolis each."""
    dim = space.flow.shape[0]
    still = kernel._replace(length=jnp.asarray(0), jumps=jnp.ones((), kernel.scale.dtype))
    dtype = kernel.scale.dtype
    position = Position(*(a.astype(dtype) for a in nowhere(CHAINS, dim)))
    _, position, _ = run(space, key, still, position, jnp.zeros((), dtype))
    if not np.isfinite(position.log_p).any():
        raise LostFitError("Expected a log_density that is finite at some draws of the fit; got none of them.")
    return position


def _tuned(key, space, kernel, position) -> tuple[Kernel, Position]:
    """The step size adapted over a chunk of transitions, which are dropped."""
    kernel, position, _ = run(space, key, kernel, position, jnp.asarray(1.0, position.x.dtype))
    return kernel, position


def _run(key, space, kernel, position, transitions) -> tuple[_Run, Position]:
    parts = []
    for number in range(transitions // CHUNK):
        _, position, trace = run(space, jr.fold_in(key, number), kernel, position, jnp.zeros((), position.x.dtype))
        parts.append(trace)
    arrays = (np.concatenate([np.asarray(array) for array in arrays]) for arrays in zip(*parts, strict=True))
    trace: Any = Trace(*(np.swapaxes(array, 0, 1) for array in arrays))  # pyright: ignore[reportArgumentType]
    return _judged(trace, int(kernel.length)), position


def _judged(trace, length) -> _Run:
    # Sorting all draws of long chains takes longer than the chains; a subset is as informative.
    thin = max(1, trace.z.shape[1] // _JUDGED)
    weights = trace.log_weight[:, ::thin, None]
    return _Run(trace, convergence(trace.z[:, ::thin]), convergence(weights), length)


def _is_converged(parameters: Convergence, weights: Convergence) -> bool:
    limits = (parameters, RHAT), (weights, WEIGHTS_RHAT)
    return all(
        found.rhat.max() < limit and min(found.ess_bulk.min(), found.ess_tail.min()) >= LEAST_ESS
        for found, limit in limits
    )


def _is_rough(latest: _Run, kernel: Kernel) -> bool:
    """Whether so many trajectories diverge that smaller steps are worth a trial."""
    return bool(latest.trace.divergent.mean() > FEW_DIVERGENCES and kernel.target < _HIGHEST_TARGET)


def _retuned(kernel: Kernel, latest: _Run, lengths: dict[int, float], is_tuning: bool) -> Kernel:
    """Settings for the next run: momenta from the draws of this run, and another number or size of steps."""
    x = latest.trace.x[:, latest.transitions // 2 :]
    tuned = with_moments(kernel, x, min(x.shape[0] * x.shape[1], latest.ess + CHAINS) / 4)
    length = _next_length(lengths, latest.length)
    # Divergences say little while the momenta do not suit the target.
    if _is_rough(latest, kernel) and not is_tuning:
        length = max(lengths, key=lambda length: lengths[length], default=length)
        lengths.clear()
        tuned = tuned._replace(target=(1 + kernel.target) / 2)
    return tuned._replace(length=jnp.asarray(length))


def _next_length(lengths: dict[int, float], latest: int) -> int:
    """The number of leapfrog steps to try next: twice as many while none is known to suit, then hill climbing."""
    if not lengths:
        return min(2 * latest, _LONGEST)
    best = max(lengths, key=lambda length: lengths[length])
    if best != latest:
        return best
    untried = [length for length in (2 * best, best // 2) if 1 <= length <= _LONGEST and length not in lengths]
    return untried[0] if untried else best


def _joined(first: _Run, second: _Run) -> _Run:
    """Two runs with the same settings, one after the other."""
    pairs = zip(first.trace, second.trace, strict=True)
    trace: Any = Trace(*(np.concatenate(pair, axis=1) for pair in pairs))  # pyright: ignore[reportArgumentType]
    return _judged(trace, first.length)


def _next_transitions(latest: _Run, is_tuning: bool, is_settled: bool, least: int) -> int:
    """The number of transitions that should suffice, at most four times the last; a settled run only needs the rest."""
    if is_tuning:
        return 2 * CHUNK
    before = latest.transitions
    needed = max(1.2 * _ENOUGH_ESS / max(latest.ess, 1.0) * before, least)
    needed = needed if latest.is_converged else max(needed, 2 * before)
    more = np.clip(needed - before, CHUNK, 3 * before) if is_settled else np.clip(needed, 4 * CHUNK, 4 * before)
    return int(np.ceil(more / CHUNK)) * CHUNK


def _thinned(latest: _Run, kernel, position, draws, spent) -> Chains:
    # At least four draws of each chain.
    thin = int(np.clip(latest.transitions * CHAINS // draws, 1, latest.transitions // 4))
    trace = latest.trace
    return Chains(
        np.asarray(trace.z[:, thin - 1 :: thin]),
        np.asarray(trace.log_weight[:, thin - 1 :: thin]),
        latest.convergence,
        float(trace.acceptance.mean()),
        float(trace.jumped.mean() / kernel.jumps),
        int(trace.divergent.sum()),
        float(trace.narrow.mean() / SMALL_SHARE),
        np.asarray(trace.divergent[:, thin - 1 :: thin]),
        latest.weights_convergence,
        thin,
        spent,
        kernel,
        position,
    )
