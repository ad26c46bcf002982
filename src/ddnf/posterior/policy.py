"""The policy of a fit: chooses the next stage from the diagnoses so far."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from ddnf.posterior.chain_stages import polish, try_chains, try_plain_chains, warm_up
from ddnf.posterior.cost import affordable_gradients
from ddnf.posterior.diagnosis import KHAT
from ddnf.posterior.issues import find_issues
from ddnf.posterior.log import Log, Row
from ddnf.posterior.modes import LARGEST_FULL
from ddnf.posterior.polish import MOST_CHEAP
from ddnf.posterior.stages import (
    check,
    enlarge,
    find_modes,
    fit_base,
    is_enough,
    join,
    train,
    unfold,
    uses_default_flow,
)
from ddnf.posterior.state import Candidate, State

# Another round of the same training is worthwhile above this ESS, or if the last round raised the ELBO.
_NEARLY_GOOD, _NEARLY_GOOD_LARGER = 0.9, 0.5
_GAIN = 0.05
_SMALL_GAIN = 0.002
# From this many dimensions on, chains through the base are tried before a flow is trained.
_MANY_DIMENSIONS = 25
# How often Gaussians around missed mass may be added to the base.
_JOINS = 3
# A larger flow is trained before the chains run if the ESS is lower than this and -log ESS per dimension is above this.
# Small errors in many dimensions lower the ESS but do not hinder chains.
_POOR = 0.1
# Chains without a flow are tried if its ESS is lower than this. Through a better flow, few transitions are enough.
_HARDLY_HELPS = 0.5
_POOR_PER_DIM = 0.025

Stage = Callable[[State], State]


class Decision(NamedTuple):
    """The next stage, its name and the reason for it; no stage at the end."""

    stage: Stage | None
    name: str
    reason: str


def next_stage(state: State) -> Decision:
    """The next stage: modes, base, training, chains if the flow is not good enough, checks, end."""
    settings = state.settings
    if state.trained is None:
        if settings.end is not None and not state.modes:
            return Decision(find_modes, "modes", "")
        return Decision(fit_base, "base", "")
    if state.missed and uses_default_flow(state) and state.joined < _JOINS:
        return Decision(join, f"join {state.joined + 1}", f"{state.missed[0].share:.0%} of the mass missed, join it")
    if state.evidence is not None:
        return _after_check(state)
    if state.is_polished:
        return _after_polish(state)
    training = _next_training(state)
    if isinstance(training, Decision):
        return training
    if settings.exact == "always" or (settings.exact == "auto" and training != "good"):
        if _may_try_plain_chains(state):
            return Decision(try_plain_chains, "plain chains", f"{training}, try chains without it")
        return _next_polish(state, training)
    return Decision(check, "check", training)


def _next_training(state: State) -> Decision | str:
    """The next round of training; or why there is none."""
    settings = state.settings
    last = state.candidates[-1] if state.candidates else None
    trains = settings.flow is not None or settings.regularizer is not None or state.is_enlarged
    if last is not None and last.is_confirmed and (state.rounds or not trains):
        is_last = state.is_extended or state.rounds == settings.rounds or not uses_default_flow(state)
        if is_enough(state, last) or is_last:
            return "good"
        if state.rounds:
            name = _round_name(state)
            return Decision(partial(train, name=name, is_extended=True), name, "not confirmed, train")
    if state.rounds == settings.rounds:
        return "no round left"
    name = _round_name(state)
    if _may_try_chains(state):
        if state.warm is None and _is_far_off(state):
            return Decision(warm_up, "warm up", "run chains from random starts")
        return Decision(try_chains, "chains", "try chains")
    if state.rounds == 0:
        return Decision(partial(train, name=name), name, "train")
    if state.failed and state.failed[-1].endswith(f"flow {state.rounds}"):
        return _restart(state, name, 10, "not finite")
    if last is None or not last.is_sound:
        return _after_folds(state, name)
    if state.candidates[0].stage == "base" and last.rank < state.candidates[0].rank:
        return _restart(state, name, 4, "worse than base")
    if settings.exact == "never":
        if last.diagnosis.ess < _NEARLY_GOOD and _gain(state.candidates) < _GAIN:
            return "no gain"
    elif last.diagnosis.ess < _worth_training(state) or _gain(state.candidates) < _SMALL_GAIN:
        return "not good"
    return Decision(partial(train, name=name), name, "not good yet, train")


def _worth_training(state: State) -> float:
    """The ESS above which another round takes less time than chains. For a larger flow it is lower."""
    return _NEARLY_GOOD_LARGER if state.is_enlarged else _NEARLY_GOOD


def _may_try_chains(state: State) -> bool:
    """Whether to run chains before training: in many dimensions they cost less than a flow, and often need none."""
    s = state.settings
    is_first = state.rounds == 0 and not state.is_tried and not state.is_enlarged and bool(state.candidates)
    is_free = s.exact == "auto" and s.regularizer is None and uses_default_flow(state)
    return is_first and is_free and s.target.dim >= _MANY_DIMENSIONS


def _is_far_off(state: State) -> bool:
    """Whether chains that start from a Gaussian would start in the wrong place."""
    diagnosis, is_gaussian = state.best.diagnosis, state.base is None and state.settings.target.dim <= LARGEST_FULL
    return is_gaussian and (diagnosis.khat > KHAT or diagnosis.ess < _POOR)


def _round_name(state: State) -> str:
    return f"{'larger flow' if state.is_enlarged else 'flow'} {state.rounds + 1}"


def _after_folds(state: State, name: str) -> Decision:
    """A default flow continues with smaller steps, which fold less. If it folds again, or is custom, it restarts."""
    if not uses_default_flow(state) or state.is_finer:
        return _restart(state, name, 4, "folds")
    return Decision(lambda state: train(unfold(state), name=name), name, "folds, go on with twice the steps")


def _may_try_plain_chains(state: State) -> bool:
    """Whether to try chains without the flow, which on a cheap target are faster than a better flow and its chains."""
    is_first = not state.is_tried and not state.is_enlarged and state.base is None and len(state.candidates) > 1
    if not is_first or state.settings.exact != "auto" or not uses_default_flow(state):
        return False
    target = state.settings.target
    is_by_flow = state.candidates[0].stage == "base" and state.best.stage != "base"
    is_poor = state.best.diagnosis.ess < _HARDLY_HELPS
    return is_by_flow and is_poor and affordable_gradients(target.programs.density, target.dim) >= MOST_CHEAP / 2


def _next_polish(state: State, reason: str) -> Decision:
    if state.candidates and _is_poor(state) and not state.is_enlarged and uses_default_flow(state):
        return Decision(enlarge, "enlarge", f"{reason}, larger flow")
    # If a larger flow may follow, chains without progress are stopped early.
    is_trial = uses_default_flow(state) and not state.is_enlarged
    return Decision(partial(polish, is_trial=is_trial), "polish", f"{reason}, run chains")


def _is_poor(state: State) -> bool:
    dim = state.settings.target.dim
    return state.best.diagnosis.ess < min(_POOR, np.exp(-_POOR_PER_DIM * dim))


def _after_polish(state: State) -> Decision:
    chains = state.polished[-1].chains
    figures = f"R-hat {chains.rhat:.3f}, ESS {chains.ess:.0f}"
    if not state.polished[-1].is_good and not state.is_enlarged and uses_default_flow(state):
        return Decision(enlarge, "enlarge", f"{figures}, larger flow")
    return Decision(check, "check", figures)


def _after_check(state: State) -> Decision:
    assert state.evidence is not None
    settings = state.settings
    is_settled = state.is_polished or (state.exact is not None and state.exact.is_good)
    issues = find_issues(state.evidence)
    if not is_settled and (issues or not is_enough(state, state.best)):
        if state.rounds < settings.rounds and uses_default_flow(state) and not state.is_extended:
            name = _round_name(state)
            return Decision(partial(train, name=name, is_extended=True), name, "not confirmed, train")
        if settings.exact == "auto" and (issues or state.exact is not None):
            return _next_polish(state, "issues found" if issues else "not confirmed")
    return Decision(None, "", f"return {state.best.stage if state.exact is None else 'chains'}")


def _gain(candidates: tuple[Candidate, ...]) -> float:
    """The increase of the ELBO by the last round; infinite after the first round."""
    rounds = [candidate for candidate in candidates if candidate.stage != "base"]
    return rounds[-1].diagnosis.finite_elbo - rounds[-2].diagnosis.finite_elbo if len(rounds) > 1 else np.inf


def _restart(state: State, name, divisor, why) -> Decision:
    rate = state.learning_rate / divisor
    return Decision(partial(train, name=name, restart_rate=rate), name, f"{why}, restart at rate {rate:.2g}")


def run_stage(state: State, decision: Decision) -> State:
    """Runs a stage and adds it to the log, with what comes next."""
    assert decision.stage is not None
    began, before, known = time.perf_counter(), state.gradients + state.search.gradients, len(state.candidates)
    state = decision.stage(state)
    spent = state.gradients + state.search.gradients - before
    new = state.candidates[known:]
    following = next_stage(state)
    row = Row(decision.name, time.perf_counter() - began, spent, decision=following.reason or following.name)
    is_checked = state.evidence is not None and state.exact is None
    diagnosis = new[0].diagnosis if new else state.best.diagnosis if is_checked else None
    if diagnosis is not None:
        row = row._replace(elbo=diagnosis.elbo, khat=diagnosis.khat, ess=diagnosis.ess)
    return dataclasses.replace(state, log=Log([*state.log, row]))
