"""How a posterior is fitted: stages that take a state and return the next, and a policy that picks the stage.

Modes, base (a Gaussian, or a mixture of those at several modes), rounds of training of the flow, checks; if these find
mass that the fit misses, it joins the mixture and the fit starts again. Base and rounds add a candidate each, with its
diagnosis; the best candidate is the result.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection, Chain
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.bijection import DDNF
from ddnf.flow.folds import folded_share
from ddnf.flow.parts import as_exact
from ddnf.posterior.diagnosis import EVALUATED, GOOD_KHAT, Diagnosis, Sample, diagnose_sample, evaluate
from ddnf.posterior.evaluate import LostFitError, draw
from ddnf.posterior.issues import Evidence, gather_evidence, probe_points, random_starts
from ddnf.posterior.log import Log, Row
from ddnf.posterior.mixture import ModeMixture, mixture_at_modes
from ddnf.posterior.modes import LARGEST_FULL, Gaussian, Search, gaussians, merged, with_more_modes
from ddnf.posterior.objective import End, Gradient, ReverseKL, Whitening, best_gradient, whitening
from ddnf.posterior.proper import check_proper
from ddnf.posterior.target import Target
from ddnf.system.background import in_background
from ddnf.training import loop

# A further round of the same training is worth its time if this ESS is near, or if the last one raised the ELBO.
_NEARLY_GOOD = 0.9
_GAIN = 0.05
# How often Gaussians at missed mass may join the base.
_JOINS = 3


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `fit_posterior`, and its random keys."""

    target: Target
    flow: AbstractBijection | None
    steps: int
    batch: int
    rounds: int
    searches: int
    end: End | None
    gradient: Gradient | None
    temper: float | None
    regularizer: Callable[[AbstractBijection, Array], Array] | None
    checkpoint: str | PathLike | None
    progress: bool
    flow_key: PRNGKeyArray
    search_key: PRNGKeyArray
    fit_key: PRNGKeyArray
    check_key: PRNGKeyArray


class Candidate(NamedTuple):
    """The fit after a stage, in the space of the target, with what importance weights say of it."""

    stage: str
    flow: AbstractBijection
    sample: Sample
    diagnosis: Diagnosis
    is_sound: bool
    skipped: int
    base: ModeMixture | None

    @property
    def is_good(self) -> bool:
        return self.is_sound and self.diagnosis.is_good

    @property
    def rank(self) -> tuple[bool, bool, float, float]:
        """Larger is better."""
        return self.is_sound, self.is_good, round(self.diagnosis.finite, 2), self.diagnosis.finite_elbo


@dataclasses.dataclass(frozen=True)
class State:
    """All that is known in the course of a fit.

    Attributes:
        settings: what the fit was asked for.
        search: the search for modes, with its compiled programs.
        learning_rate: of the next round.
        modes: Gaussians at the modes, the best first.
        whitening: the affine map that standardizes the target; None with `end=None`.
        base: the mixture that the flow starts from, in the coordinates of the whitening; None for the standard normal.
        joined: how often Gaussians have joined the modes after a check.
        initial: the untrained flow, in the coordinates of the whitening.
        trained: the flow after the last round, or `initial` again after a restart.
        candidates: the fit after each stage, without those that have no density at all.
        rounds: rounds of training so far.
        failed: names of the rounds that stopped because most steps were not finite, or ended with no density.
        losses, seconds: mean loss and wall time of each chunk of training.
        gradients: gradient evaluations so far, without those of the search.
        evidence: the checks of the result.
        log: the stages so far.
    """

    settings: Settings
    search: Search
    learning_rate: float
    modes: tuple[Gaussian, ...] = ()
    whitening: Whitening | None = None
    base: ModeMixture | None = None
    joined: int = 0
    initial: AbstractBijection | None = None
    trained: AbstractBijection | None = None
    candidates: tuple[Candidate, ...] = ()
    rounds: int = 0
    failed: tuple[str, ...] = ()
    losses: tuple[Float[np.ndarray, " n"], ...] = ()
    seconds: tuple[Float[np.ndarray, " n"], ...] = ()
    gradients: int = 0
    evidence: Evidence | None = None
    log: Log = dataclasses.field(default_factory=Log)

    @property
    def best(self) -> Candidate:
        if not self.candidates:
            raise LostFitError("Expected a log_density that is finite at some draws of the fit; got none of them.")
        return max(self.candidates, key=lambda candidate: candidate.rank)


Stage = Callable[[State], State]


class Decision(NamedTuple):
    """The next stage, its name, and why it comes next; no stage at the end."""

    stage: Stage | None
    name: str
    reason: str


def next_stage(state: State) -> Decision:
    """The policy: what comes next, from the diagnoses so far."""
    settings = state.settings
    if state.initial is None:
        if settings.end is not None and not state.modes:
            return Decision(find_modes, "modes", "")
        return Decision(fit_base, "base", "")
    if state.evidence is not None:
        missed = state.evidence.missed
        if missed and _uses_mixtures(settings) and state.joined < _JOINS:
            return Decision(join, f"join {state.joined + 1}", f"{missed[0].share:.0%} of the mass missed, join it")
        return Decision(None, "", f"return {state.best.stage}")
    last = state.candidates[-1] if state.candidates else None
    trains = settings.flow is not None or settings.regularizer is not None
    if last is not None and last.is_good and (state.rounds or not trains):
        return Decision(check, "check", "good")
    if state.rounds == settings.rounds:
        return Decision(check, "check", "no round left")
    name = f"flow {state.rounds + 1}"
    if state.rounds == 0:
        return Decision(partial(train, name=name), name, "train")
    if state.failed and state.failed[-1] == f"flow {state.rounds}":
        return _restart(state, name, 10, "not finite")
    if last is None or not last.is_sound:
        return _restart(state, name, 4, "folds")
    if state.candidates[0].stage == "base" and last.rank < state.candidates[0].rank:
        return _restart(state, name, 4, "worse than base")
    if last.diagnosis.ess < _NEARLY_GOOD and _gain(state.candidates) < _GAIN:
        return Decision(check, "check", "no gain")
    return Decision(partial(train, name=name), name, "not good yet, train")


def _gain(candidates: tuple[Candidate, ...]) -> float:
    """By how much the last round raised the ELBO over that of the round before; infinite after the first."""
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
    if new:
        diagnosis = new[0].diagnosis
        row = row._replace(elbo=diagnosis.elbo, khat=diagnosis.khat, ess=diagnosis.ess)
    return dataclasses.replace(state, log=Log([*state.log, row]))


def find_modes(state: State) -> State:
    """Checks that the target falls off, and looks for its modes."""
    s = state.settings
    with in_background(_compile_flow, s):
        check_proper(s.search_key, s.target)
        found = gaussians(s.search_key, s.target, state.search, s.searches)
        if _uses_mixtures(s):
            found = with_more_modes(s.search_key, state.search, found, random_starts(s.check_key, s.target))
    return dataclasses.replace(state, modes=tuple(found))


def fit_base(state: State) -> State:
    """A Gaussian, or a mixture of those at the modes, before a flow that is nearly the identity."""
    s = state.settings
    flow = default_flow(s.flow_key, s.target.dim) if s.flow is None else s.flow
    whiten = None if s.end is None else whitening(*merged(list(state.modes))[:2], s.end)
    initial = flow if whiten is None else Chain([flow, whiten.end()])
    base = None
    if whiten is not None and len(state.modes) > 1 and _uses_mixtures(s):
        base = mixture_at_modes(s.search_key, s.target, state.modes, whiten)
    state = dataclasses.replace(state, whitening=whiten, base=base, initial=initial, trained=initial)
    return _with_candidate(state, "base", 0)


def train(state: State, *, name: str, restart_rate: float | None = None) -> State:
    """One round of training of the flow and its affine end; from the beginning if it restarts with another rate."""
    if restart_rate is not None:
        state = dataclasses.replace(state, trained=state.initial, learning_rate=restart_rate)
    s, first = state.settings, state.rounds == 0
    assert state.trained is not None and state.initial is not None
    temper = (0.3 if len(state.modes) > 1 and state.base is None else 0.0) if s.temper is None else s.temper
    is_wide = bool(state.candidates) and not first and state.candidates[-1].diagnosis.khat >= GOOD_KHAT
    gradient = best_gradient(state.initial) if s.gradient is None else s.gradient
    objective = ReverseKL(
        s.target.log_density,
        state.whitening,
        s.regularizer,
        s.batch,
        gradient,
        int(temper * s.steps) if first else 0,
        jnp.asarray(1.5 if is_wide else 1.0),
        state.base,
    )
    is_ahead = first and s.end is not None and not _uses_mixtures(s)
    starts = random_starts(s.check_key, s.target) if is_ahead else []
    with in_background(_search_ahead, state.search, starts):
        result = loop.fit(
            jr.fold_in(s.fit_key, state.rounds + 100 * state.joined),
            state.trained,
            objective,
            steps=s.steps,
            optimizer=loop.adam(state.learning_rate, s.steps),
            checkpoint=_checkpoint(state),
            progress=s.progress,
            description=f"posterior, {name}",
            warn=False,
        )
    state = dataclasses.replace(
        state,
        trained=result.parameters,
        rounds=state.rounds + 1,
        failed=state.failed + ((name,) if result.reason == loop.TOO_MANY_BAD else ()),
        losses=(*state.losses, result.losses),
        seconds=(*state.seconds, result.seconds),
        gradients=state.gradients + result.steps * s.batch,
    )
    return _with_candidate(state, name, result.skipped)


def _checkpoint(state: State) -> str | None:
    folder, joined = state.settings.checkpoint, f"-{state.joined}" if state.joined else ""
    return None if folder is None else f"{folder}/round-{state.rounds}{joined}"


def check(state: State) -> State:
    """All diagnoses of the best candidate."""
    s, best = state.settings, state.best
    losses = np.concatenate(state.losses) if state.losses else np.zeros(0)
    evidence = gather_evidence(
        s.check_key,
        best.flow,
        s.target,
        losses,
        search=state.search,
        modes=state.modes,
        sample=best.sample,
        base=best.base,
    )
    return dataclasses.replace(state, evidence=evidence, gradients=state.gradients + evidence.drift.gradients)


def join(state: State) -> State:
    """Adds Gaussians around missed mass to the modes, and starts again without the candidates that miss it."""
    assert state.evidence is not None
    log_evidence = state.evidence.diagnosis.log_evidence
    # The components that are there have the rest of the mass, in the ratios of their ELBOs.
    surplus = np.logaddexp.reduce([mode.elbo for mode in state.modes]) - log_evidence
    modes = [mode._replace(elbo=float(mode.elbo - surplus)) for mode in state.modes]
    for share, _, normal in state.evidence.missed:
        share = min(share, 1 - 1e-6)
        elbo = float(log_evidence + np.log(share / (1 - share)))
        modes.append(Gaussian(normal.mean, normal.scale, elbo, normal.mean))
    modes = tuple(sorted(modes, key=lambda mode: -mode.elbo))
    return dataclasses.replace(
        state, modes=modes, joined=state.joined + 1, initial=None, candidates=(), evidence=None, rounds=0, failed=()
    )


def training_issue(state: State) -> str | None:
    """What non-finite steps did to the result; None if it is good all the same."""
    best = state.best
    if best.is_good or not (state.failed or best.skipped):
        return None
    advice = "Try a smaller learning rate, float64, or a log density without NaN."
    if state.failed:
        rounds = ", ".join(state.failed)
        return f"Training was not finite in {rounds}; the result is that of stage {best.stage}. {advice}"
    return f"{best.skipped} steps of stage {best.stage} were skipped, not finite; the result has the others. {advice}"


def default_flow(key: PRNGKeyArray, dim: int) -> DDNF:
    """The flow that `fit_posterior` takes where none is given.

    Example:
        >>> import jax.random as jr
        >>> default_flow(jr.key(0), 3).shape
        (3,)
    """
    if dim <= 2:
        return DDNF(key, dim, blocks=4, steps=4, hidden=(16, 16), activation="softplus")
    return DDNF(key, dim, blocks=16, steps=2, hidden=(3,), activation="softplus")


def resolve_end(end, dim: int) -> End | None:
    """The kind of affine end, with "auto" resolved."""
    return ("full" if dim <= LARGEST_FULL else "diagonal") if end == "auto" else end


def _with_candidate(state: State, name: str, skipped: int) -> State:
    s, flow = state.settings, _merged_flow(state.trained, state.whitening)
    try:
        sample = evaluate(s.check_key, flow, s.target, base=state.base)
    except LostFitError:
        return dataclasses.replace(state, failed=state.failed if name == "base" else (*state.failed, name))
    is_sound = folded_share(flow, probe_points(s.check_key, s.target.dim, state.base)) == 0
    new = Candidate(name, flow, sample, diagnose_sample(sample), is_sound, skipped, state.base)
    return dataclasses.replace(state, candidates=(*state.candidates, new))


def _uses_mixtures(settings: Settings) -> bool:
    """Several modes get a mixture as the base of the default flow; a flow of the user's starts from a normal."""
    return settings.flow is None and settings.end is not None


def _merged_flow(flow, whiten) -> AbstractBijection:
    return as_exact(flow if whiten is None else whiten.merge(flow))


def _compile_flow(settings: Settings) -> None:
    """Compiles the programs that evaluate a flow, which do not depend on the target, on one of the same structure."""
    s, dim = settings, settings.target.dim
    assert s.end is not None
    flow = default_flow(s.flow_key, dim) if s.flow is None else s.flow
    whiten = whitening(np.zeros(dim), np.eye(dim), s.end)
    whole = _merged_flow(Chain([flow, whiten.end()]), whiten)
    draw(whole, s.check_key, EVALUATED)
    folded_share(whole, probe_points(s.check_key, dim))


def _search_ahead(search: Search, starts) -> None:
    for start in starts:
        search.mode_from(start)
