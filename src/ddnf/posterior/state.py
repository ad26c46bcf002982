"""The settings of a fit, and its state during the stages."""

import dataclasses
from collections.abc import Callable
from os import PathLike
from typing import Literal, NamedTuple

import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.posterior.diagnosis import EVALUATED, Diagnosis, Sample
from ddnf.posterior.evaluate import LostFitError
from ddnf.posterior.issues import Evidence
from ddnf.posterior.log import Log
from ddnf.posterior.mixture import ModeMixture
from ddnf.posterior.modes import Gaussian, Search
from ddnf.posterior.objective import End, Gradient, Whitening
from ddnf.posterior.polish import Chains
from ddnf.posterior.regions import Missed
from ddnf.posterior.target import Target
from ddnf.posterior.warmup import Warm

Exact = Literal["auto", "always", "never"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `fit_posterior`, and its random keys."""

    target: Target
    flow: AbstractBijection | None
    steps: int | None
    batch: int
    learning_rate: float
    rounds: int
    searches: int
    end: End | None
    gradient: Gradient | None
    temper: float | None
    regularizer: Callable[[AbstractBijection, Array], Array] | None
    checkpoint: str | PathLike | None
    exact: Exact
    progress: bool
    flow_key: PRNGKeyArray
    search_key: PRNGKeyArray
    fit_key: PRNGKeyArray
    check_key: PRNGKeyArray


class Candidate(NamedTuple):
    """The fit after a stage, in the space of the target, with its importance weights and the mass it may miss."""

    stage: str
    flow: AbstractBijection
    sample: Sample
    diagnosis: Diagnosis
    is_sound: bool
    skipped: int
    base: ModeMixture | None
    missed: tuple[Missed, ...] = ()

    @property
    def is_good(self) -> bool:
        return self.is_sound and self.diagnosis.is_good

    @property
    def khat_for_chains(self) -> float:
        """k-hat, where it says that chains may be slow to enter some place; an affine map has no such place."""
        return 0.0 if self.stage == "base" and self.base is None else self.diagnosis.khat

    @property
    def is_confirmed(self) -> bool:
        """Whether it was diagnosed with as many draws as the final result, because it looked good with fewer."""
        return len(self.sample.z) >= EVALUATED

    @property
    def rank(self) -> tuple[bool, bool, float, float]:
        """Larger is better."""
        return self.is_sound, self.is_good, round(self.diagnosis.finite, 2), self.diagnosis.finite_elbo


class Polished(NamedTuple):
    """Markov chains through the flow of a candidate, and the mass that they found and the flow misses."""

    candidate: Candidate
    chains: Chains
    missed: tuple[Missed, ...] = ()

    @property
    def is_good(self) -> bool:
        return self.chains.is_converged and not self.chains.is_slow(self.candidate.khat_for_chains)


@dataclasses.dataclass(frozen=True)
class State:
    """The state of a fit.

    Attributes:
        settings: the arguments of the fit.
        search: the search for modes, with its compiled programs.
        learning_rate: of the next round.
        modes: Gaussians at the modes, the best first.
        whitening: the affine map that standardizes the target; None with `end=None`.
        base: the mixture that the flow starts from, in the coordinates of the whitening; None for the standard normal.
        joined: how often Gaussians were added to the modes after a check.
        initial: the untrained flow, in the coordinates of the whitening; None before one is built.
        trained: the flow after the last round, or `initial` again after a restart; at first the base alone.
        candidates: the fit after each stage, without those that have no density at all.
        rounds: rounds of training of this flow so far.
        is_enlarged: whether a larger flow has taken the place of the default one.
        is_finer: whether this flow has twice its initial number of steps.
        is_extended: whether training was extended once because more draws did not confirm that the fit is good.
        warm: Markov chains from random starts, after their warm-up; None before.
        is_tried: whether chains through the base alone have been tried.
        polished: Markov chains, at most one set for each of these flows.
        is_polished: whether chains have run through this flow.
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
    is_enlarged: bool = False
    is_finer: bool = False
    is_extended: bool = False
    warm: Warm | None = None
    is_tried: bool = False
    polished: tuple[Polished, ...] = ()
    is_polished: bool = False
    failed: tuple[str, ...] = ()
    losses: tuple[Float[np.ndarray, " _"], ...] = ()
    seconds: tuple[Float[np.ndarray, " _"], ...] = ()
    gradients: int = 0
    evidence: Evidence | None = None
    log: Log = dataclasses.field(default_factory=Log)

    @property
    def best(self) -> Candidate:
        if not self.candidates:
            raise LostFitError("Expected a log_density that is finite at some draws of the fit; got none of them.")
        return max(self.candidates, key=lambda candidate: candidate.rank)

    @property
    def missed(self) -> tuple[Missed, ...]:
        """Mass that the latest fit misses, according to the last check, chains or draws that found some."""
        latest = [] if self.evidence is None else [self.evidence]
        return next((one.missed for one in (*latest, *self.polished[-1:], *self.candidates[-1:]) if one.missed), ())

    @property
    def exact(self) -> Polished | None:
        """The chains that converged best; None without chains, or if none converged and a flow is good on its own."""
        best = min(self.polished, key=lambda one: (not one.is_good, one.chains.rhat), default=None)
        is_needed = best is None or best.is_good or self.settings.exact == "always" or not self.best.is_good
        return best if is_needed else None
