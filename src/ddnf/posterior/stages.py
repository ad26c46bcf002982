"""The stages of a fit: each takes a state and returns the next. `policy.py` chooses the stage.

The stages are modes, base (a Gaussian, or a mixture of Gaussians at several modes), rounds of training, a larger flow,
Markov chains, and checks. If the checks find mass that the fit misses, it is added to the mixture, and the fit starts
again. The base and each round add a candidate with its diagnosis. The best candidate is the result, or the flow that
the chains run through.
"""

import dataclasses
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection, Chain

from ddnf.flow.certificate import compile_certificate
from ddnf.flow.folds import folded_share
from ddnf.flow.parts import as_exact, ddnf_parts
from ddnf.posterior.defaults import default_spread, untrained_flow
from ddnf.posterior.diagnosis import GOOD_KHAT, KHAT, QUICKLY, diagnose_sample, evaluate
from ddnf.posterior.evaluate import LostFitError, compile_draws
from ddnf.posterior.gaussian import reweighted
from ddnf.posterior.issues import gather_chain_evidence, gather_evidence, missed_above, probe_points, random_starts
from ddnf.posterior.mixture import mixture_at_modes
from ddnf.posterior.modes import Gaussian, gaussians, merged, with_all_modes, with_more_modes
from ddnf.posterior.objective import PathGradient, ReverseKL, Whitening, best_gradient, chain, whitening
from ddnf.posterior.proper import check_proper
from ddnf.posterior.state import Candidate, Settings, State
from ddnf.posterior.target import Target
from ddnf.system.compiling import compiling_ahead
from ddnf.training import loop

# Training steps of the first round, which suffices for most targets; of a second one if it nearly did; of all others.
FIRST_STEPS = 600
STEPS = 2500
_NEAR = 0.97
# By how much more a quarter of the draws is spread out after a high k-hat.
_FAR = 2.0
# The path gradient has little noise at the end of training: Adam can forget sooner how large gradients were at first.
_B2 = 0.99
_REFINEMENTS = 3


def find_modes(state: State) -> State:
    """Checks that the target falls off, and searches for its modes."""
    s = state.settings
    check_proper(s.search_key, s.target)
    found = gaussians(s.search_key, s.target, state.search, s.searches)
    if _uses_mixtures(s):
        found = with_more_modes(s.search_key, state.search, found, random_starts(s.check_key, s.target))
        found = with_all_modes(s.search_key, state.search, found)
    return dataclasses.replace(state, modes=tuple(found))


def fit_base(state: State) -> State:
    """A Gaussian or a mixture of Gaussians at the modes, evaluated before any flow is built, or with a custom flow."""
    s = state.settings
    whiten = None if s.end is None else whitening(*merged(list(state.modes))[:2], s.end)
    base = None
    if whiten is not None and len(state.modes) > 1 and _uses_mixtures(s):
        base = mixture_at_modes(s.search_key, s.target, state.modes, whiten)
    state = dataclasses.replace(state, whitening=whiten, base=base)
    if not _uses_mixtures(s):
        flow = untrained_flow(s.flow_key, s.target.dim) if s.flow is None else s.flow
        return _with_candidate(_with_flow(state, flow), "base", 0)
    assert whiten is not None
    state = _with_candidate(dataclasses.replace(state, trained=chain([whiten.end()])), "base", 0)
    return state if base is not None else _refined(state)


def _refined(state: State) -> State:
    """The base with mean and covariance corrected by importance weights, as long as this improves it."""
    s, dim = state.settings, state.settings.target.dim
    for _ in range(_REFINEMENTS):
        if not state.candidates or s.end is None or state.whitening is None:
            break
        candidate = state.candidates[-1]
        diagnosis = candidate.diagnosis
        is_known = diagnosis.khat < KHAT and diagnosis.ess * QUICKLY > 10 * dim
        known = state.whitening.mean, state.whitening.scale
        moments = reweighted(candidate.sample, *known) if is_known and not diagnosis.is_good else None
        if moments is None:
            break
        whiten = whitening(*moments, s.end)
        other = dataclasses.replace(state, whitening=whiten, trained=chain([whiten.end()]), candidates=())
        other = _with_candidate(other, "base", 0)
        if not other.candidates or other.candidates[-1].diagnosis.ess < diagnosis.ess:
            break
        state = other
    return state


def _with_flow(state: State, flow: AbstractBijection) -> State:
    """A state with an untrained flow, followed by an affine end."""
    whiten = state.whitening
    initial = flow if whiten is None else chain([flow, whiten.end()])
    return dataclasses.replace(state, initial=initial, trained=initial)


def unfold(state: State) -> State:
    """The default flow integrated with twice as many steps; training continues from its parameters."""
    assert isinstance(state.initial, Chain) and isinstance(state.trained, Chain)
    initial, trained = (
        chain([_finer(flow.bijections[0]), flow.bijections[1]]) for flow in (state.initial, state.trained)
    )
    rate = state.learning_rate / 2
    return dataclasses.replace(state, initial=initial, trained=trained, learning_rate=rate, is_finer=True)


def _finer(flow):
    return flow.with_steps(2 * flow.steps)


def train(state: State, *, name: str, restart_rate: float | None = None, is_extended: bool = False) -> State:
    """One round of training of the flow and its affine end; from the initial flow after a restart with another rate."""
    s, first = state.settings, state.rounds == 0
    if state.initial is None:
        state = _with_flow(state, untrained_flow(s.flow_key, s.target.dim))
    if restart_rate is not None:
        state = dataclasses.replace(state, trained=state.initial, learning_rate=restart_rate)
    assert state.trained is not None and state.initial is not None
    steps = s.steps if s.steps is not None else _default_steps(state)
    temper = (0.3 if len(state.modes) > 1 and state.base is None else 0.0) if s.temper is None else s.temper
    is_wide = bool(state.candidates) and not first and state.candidates[-1].diagnosis.khat >= GOOD_KHAT
    gradient = best_gradient(state.initial) if s.gradient is None else s.gradient
    batch = 2 * s.batch if state.is_enlarged else s.batch
    is_short = s.flow is None and s.target.dim > 2 and not state.is_enlarged
    far = default_spread(s.target.dim)
    spread, b2 = (far, _B2) if is_short else (1.0, 0.999)
    objective = ReverseKL(
        s.target.programs.density,
        state.whitening,
        s.regularizer,
        batch,
        gradient,
        int(temper * steps) if first else 0,
        jax.device_put(np.asarray(1 + _FAR * (far - 1) if is_wide else spread, jnp.result_type(float))),
        state.base,
        s.target.mesh,
    )
    oracle = _oracle(objective.path, s.target, is_short) if gradient == "path" else None
    with compiling_ahead(partial(_compile_diagnosis, state)) if first and is_short else nullcontext():
        result = loop.fit(
            jr.fold_in(s.fit_key, state.rounds + 100 * state.joined),
            state.trained,
            objective if oracle is None else objective.path,
            steps=steps,
            optimizer=loop.adam(state.learning_rate, steps, b2=b2),
            oracle=oracle,
            checkpoint=_checkpoint(state),
            devices=s.target.mesh,
            progress=s.progress,
            description=f"posterior, {name}",
            warn=False,
        )
    state = dataclasses.replace(
        state,
        trained=result.parameters,
        rounds=state.rounds + 1,
        evidence=None,
        is_extended=state.is_extended or is_extended,
        failed=state.failed + ((name,) if result.reason == loop.TOO_MANY_BAD else ()),
        losses=(*state.losses, result.losses),
        seconds=(*state.seconds, result.seconds),
        gradients=state.gradients + result.steps * batch,
    )
    return _with_candidate(state, name, result.skipped)


def _compile_diagnosis(state: State) -> None:
    """Compiles what `_with_candidate` runs after the first round of training of the default flow."""
    s, flow = state.settings, merged_flow(state.trained, state.whitening)
    compile_draws(flow, s.check_key, state.base)
    compile_certificate(ddnf_parts(flow)[0], probe_points(s.check_key, s.target.dim, state.base))


def _default_steps(state: State) -> int:
    if state.is_enlarged or state.settings.target.dim <= 2 or state.is_extended:
        return STEPS
    is_near = bool(state.candidates) and state.candidates[-1].diagnosis.ess > _NEAR
    return FIRST_STEPS if state.rounds == 0 or (state.rounds == 1 and is_near) else STEPS


def _oracle(objective: PathGradient, target: Target, is_short: bool = False) -> loop.Oracle:
    """The target's values and gradients: the program of the training does not contain the target."""
    gradients = target.programs.batch_gradients(objective.batch)
    return loop.Oracle(objective.ask, lambda asked: gradients(asked.z), objective.rows(target.dim), is_short)


def _checkpoint(state: State) -> str | None:
    folder, joined = state.settings.checkpoint, f"-{state.joined}" if state.joined else ""
    larger = "-larger" if state.is_enlarged else ""
    return None if folder is None else f"{folder}/round-{state.rounds}{joined}{larger}"


def check(state: State) -> State:
    """All diagnoses of the best candidate, with more draws than during the fit."""
    s = state.settings
    best = state.best if state.exact is None else state.exact.candidate
    if not best.is_confirmed:
        confirmed = _confirmed(state, best)
        state = _with_confirmed(state, best, confirmed)
        best = confirmed
    # Modes that have joined were missed by earlier searches: these go elsewhere.
    key = jr.fold_in(s.check_key, state.joined) if state.joined else s.check_key
    losses = np.concatenate(state.losses) if state.losses else np.zeros(0)
    checked = key, best.flow, s.target, losses
    known: dict[str, Any] = dict(search=state.search, modes=state.modes, base=best.base)
    if state.exact is None:
        evidence = gather_evidence(*checked, sample=best.sample, **known)
    else:
        evidence = gather_chain_evidence(*checked, fitted=best.sample, chains=state.exact.chains, **known)
    return dataclasses.replace(state, evidence=evidence, gradients=state.gradients + evidence.drift.gradients)


def _confirmed(state: State, candidate: Candidate) -> Candidate:
    """The candidate, diagnosed with as many draws as the final result."""
    s = state.settings
    sample = evaluate(s.check_key, candidate.flow, s.target, base=candidate.base)
    return candidate._replace(sample=sample, diagnosis=diagnose_sample(sample))


def _with_confirmed(state: State, known: Candidate, confirmed: Candidate) -> State:
    candidates = tuple(confirmed if one is known else one for one in state.candidates)
    polished = tuple(one._replace(candidate=confirmed) if one.candidate is known else one for one in state.polished)
    return dataclasses.replace(state, candidates=candidates, polished=polished)


def with_better_base(state: State, whiten: Whitening, *, is_surer: bool = False) -> State:
    """Another Gaussian as the base, if it fits better or is more certain to cover the mass."""
    moved = dataclasses.replace(state, whitening=whiten, base=None, trained=chain([whiten.end()]), candidates=())
    moved = _refined(_with_candidate(moved, "base", 0))
    is_better = bool(moved.candidates) and (is_surer or moved.best.rank > state.best.rank)
    return moved if is_better else state


def enlarge(state: State) -> State:
    """Replaces the default flow by a larger, untrained one.

    If chains have run without converging, it starts from the Gaussian with their moments, because they have moved
    towards the bulk of the target, wherever the search for modes ended.
    """
    s, whiten = state.settings, state.whitening
    if whiten is not None and state.polished and state.base is None and s.end is not None:
        whiten = whitening(*state.polished[-1].chains.moments(), s.end)
    flow = untrained_flow(s.flow_key, s.target.dim, is_larger=True)
    state = _with_flow(dataclasses.replace(state, whitening=whiten), flow)
    return dataclasses.replace(
        state,
        learning_rate=s.learning_rate / 2,
        is_enlarged=True,
        is_finer=False,
        is_polished=False,
        rounds=0,
        failed=(),
        evidence=None,
    )


def join(state: State) -> State:
    """Adds Gaussians around missed mass to the modes, and starts again without the candidates that miss it."""
    # The components that are there have the rest of the mass, in the ratios of their ELBOs.
    surplus = np.logaddexp.reduce([mode.elbo for mode in state.modes]) - state.missed[0].log_known
    modes = [mode._replace(elbo=float(mode.elbo - surplus)) for mode in state.modes]
    for share, _, log_known, normal in state.missed:
        share = min(share, 1 - 1e-6)
        elbo = float(log_known + np.log(share / (1 - share)))
        modes.append(Gaussian(normal.mean, normal.scale, elbo, normal.mean))
    modes = tuple(sorted(modes, key=lambda mode: -mode.elbo))
    return dataclasses.replace(
        state,
        modes=modes,
        joined=state.joined + 1,
        initial=None,
        trained=None,
        candidates=(),
        learning_rate=state.settings.learning_rate,
        losses=(),
        seconds=(),
        evidence=None,
        rounds=0,
        failed=(),
        is_enlarged=False,
        is_finer=False,
        is_extended=False,
        is_tried=False,
        is_polished=False,
        polished=(),
    )


def training_issue(state: State) -> str | None:
    """How non-finite steps affected the result; None if the result is good anyway."""
    best = state.best
    if best.is_good or not (state.failed or best.skipped):
        return None
    advice = "Try a smaller learning rate, float64, or a log density without NaN."
    if state.failed:
        rounds = ", ".join(state.failed)
        return f"Training was not finite in {rounds}; the result is from stage {best.stage}. {advice}"
    return f"{best.skipped} steps of stage {best.stage} were not finite and were skipped. {advice}"


def _with_candidate(state: State, name: str, skipped: int) -> State:
    s, flow = state.settings, merged_flow(state.trained, state.whitening)
    try:
        sample = evaluate(s.check_key, flow, s.target, base=state.base, n=QUICKLY)
    except LostFitError:
        return dataclasses.replace(state, failed=state.failed if name == "base" else (*state.failed, name))
    is_sound = folded_share(flow, probe_points(s.check_key, s.target.dim, state.base)) == 0
    diagnosis, missed = diagnose_sample(sample), ()
    if diagnosis.khat > KHAT and _uses_mixtures(s):
        missed = missed_above(s.check_key, state.search, sample, state.modes, sample.z, sample.log_weights)
    new = Candidate(name, flow, sample, diagnosis, is_sound, skipped, state.base, missed)
    if _is_promising(state, new):
        new = _confirmed(state, new)
    return dataclasses.replace(state, candidates=(*state.candidates, new))


def uses_default_flow(state: State) -> bool:
    """Whether the fit chooses the flow, and uses a mixture as its base if there are several modes."""
    return _uses_mixtures(state.settings)


def is_enough(state: State, candidate: Candidate) -> bool:
    """Whether a fit needs no more training; the requirement is weaker if chains may follow."""
    is_flow = candidate.stage != "base"
    return candidate.is_good or (is_flow and _may_be_corrected(state, candidate) and candidate.diagnosis.is_accurate)


def _is_promising(state: State, candidate: Candidate) -> bool:
    """Whether more draws may confirm that a fit is good: few say little about k-hat if weights are nearly equal."""
    diagnosis = candidate.diagnosis
    is_near = diagnosis.is_nearly_equal and diagnosis.khat < 1
    return candidate.is_good or (_may_be_corrected(state, candidate) and is_near)


def _may_be_corrected(state: State, candidate: Candidate) -> bool:
    is_alone = state.settings.exact == "never" or not uses_default_flow(state)
    return candidate.is_sound and not is_alone


def _uses_mixtures(settings: Settings) -> bool:
    """Whether several modes give a mixture as the base; custom flows always start from a normal."""
    return settings.flow is None and settings.end is not None


def merged_flow(flow, whiten) -> AbstractBijection:
    return as_exact(flow if whiten is None else whiten.merge(flow))
