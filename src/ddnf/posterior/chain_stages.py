"""The stages of a fit that run Markov chains: through its flow, and before there is one."""

import dataclasses

import jax.random as jr
import numpy as np

from ddnf.posterior.diagnosis import EVALUATED
from ddnf.posterior.hmc import Space, initial_kernel
from ddnf.posterior.issues import missed_above
from ddnf.posterior.objective import chain, whitening
from ddnf.posterior.polish import CHAINS, MET, Chains, run_polish
from ddnf.posterior.regions import Missed
from ddnf.posterior.stages import merged_flow, uses_default_flow, with_better_base
from ddnf.posterior.state import Candidate, Polished, State
from ddnf.posterior.warmup import Warm, best_starts
from ddnf.posterior.warmup import warm_up as run_warm_up

# R-hat of chains that are in the same region, even if they have not yet explored all of it.
_NEAR_EACH_OTHER = 1.5


def polish(state: State, *, is_trial: bool = False, warm: Warm | None = None) -> State:
    """Markov chains through the flow of the best candidate; discards the checks of earlier results."""
    s, best = state.settings, state.best
    key = jr.fold_in(s.check_key, 1000 + len(state.polished) + 10 * state.joined)
    space = Space(s.target.programs.density, best.flow, best.base, s.target.mesh)
    is_base = best.stage == "base"
    chains = run_polish(
        key,
        space,
        draws=EVALUATED,
        progress=s.progress,
        khat=best.khat_for_chains,
        ess=best.diagnosis.ess,
        is_trial=is_trial,
        has_flow=not is_base,
        warm=warm,
    )
    missed = () if chains.is_converged or not uses_default_flow(state) else _missed_by_flow(state, best, chains)
    return dataclasses.replace(
        state,
        polished=(*state.polished, Polished(best, chains, missed)),
        is_polished=True,
        gradients=state.gradients + chains.gradients,
        evidence=None,
    )


def _missed_by_flow(state: State, best: Candidate, chains: Chains) -> tuple[Missed, ...]:
    """The mass that the flow may lack around the point of a chain with the largest weight."""
    every, highest = np.arange(len(chains.z)), np.argmax(chains.log_weights, axis=1)
    found = chains.z[every, highest], chains.log_weights[every, highest]
    return missed_above(state.settings.check_key, state.search, best.sample, state.modes, *found)


def try_chains(state: State) -> State:
    """Markov chains through the base alone, given up early if they do not converge.

    The Gaussian with their moments then takes the place of the base if it is the better one.
    """
    # A mixture covers modes that the chains may not have reached.
    tried = polish(state, is_trial=True, warm=state.warm if state.base is None else None)
    chains = tried.polished[-1].chains
    if tried.polished[-1].is_good:
        return dataclasses.replace(tried, is_tried=True)
    # Chains that agree may turn out to be the best result.
    kept = tried.polished if chains.rhat < MET else state.polished
    state = dataclasses.replace(state, gradients=tried.gradients, is_tried=True, polished=kept)
    if state.base is not None or state.settings.end is None:
        return state
    return with_better_base(state, whitening(*chains.moments(), state.settings.end))


def try_plain_chains(state: State) -> State:
    """Markov chains through the base alone, from draws of a flow that is not good enough; dropped if not convincing.

    They start spread over the regions that the flow covers, so they only agree if they move between these regions. If
    many trajectories diverge, there is a region that the chains hardly enter, and the flow may help.
    """
    dim = state.settings.target.dim
    finite = np.flatnonzero(np.isfinite(state.best.sample.log_weights))
    z = state.best.sample.z[np.resize(finite, CHAINS)]
    warm = Warm(z, initial_kernel(dim, 0.0), z.mean(axis=0), np.eye(dim), np.inf, 0)
    alone = dataclasses.replace(state, candidates=state.candidates[:1])
    tried = polish(alone, is_trial=True, warm=warm)
    new = tried.polished[-1]
    is_accepted = new.is_good and new.chains.has_few_divergences
    polished = (*state.polished, new) if is_accepted else state.polished
    return dataclasses.replace(
        state, polished=polished, is_polished=is_accepted, is_tried=True, gradients=tried.gradients, evidence=None
    )


def warm_up(state: State) -> State:
    """Markov chains from random starts to the bulk; the Gaussian with their moments is the base if it is better."""
    s, dim = state.settings, state.settings.target.dim
    points = best_starts(s.check_key, s.target, CHAINS)
    assert s.end is not None
    plain = whitening(np.zeros(dim), np.eye(dim), "diagonal")
    space = Space(s.target.programs.density, merged_flow(chain([plain.end()]), plain), mesh=s.target.mesh)
    warm = run_warm_up(jr.fold_in(s.check_key, 2000), space, points)
    state = dataclasses.replace(state, warm=warm, gradients=state.gradients + warm.gradients)
    # Chains that are far apart would remain far apart.
    is_near = warm.rhat < _NEAR_EACH_OTHER
    state = dataclasses.replace(state, is_tried=not is_near)
    return with_better_base(state, whitening(warm.mean, warm.scale, s.end), is_surer=is_near)
