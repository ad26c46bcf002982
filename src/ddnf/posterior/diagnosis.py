"""The first diagnosis of a fit: importance weights of its own draws."""

from typing import NamedTuple

import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Float, PRNGKeyArray

from ddnf.posterior.evaluate import Base, clean, draw_in_parts
from ddnf.posterior.importance import effective_share, psis
from ddnf.posterior.target import Target

# Draws of a diagnosis during a fit, and of the final one.
QUICKLY = 2000
EVALUATED = 10_000
KHAT = 0.7
# k-hat is a noisy estimate, so training continues until it is clearly below the limit.
GOOD_KHAT = 0.6
# Weights this equal have hardly a tail to estimate k-hat from, and cannot change a moment.
_NEARLY_EQUAL = 0.999


class Diagnosis(NamedTuple):
    """A fit by the importance weights of fresh draws.

    Attributes:
        elbo: the exact evidence lower bound; -inf if the target is not finite at some draw.
        elbo_error: its standard error.
        log_evidence: log of the target's integral, by importance sampling.
        khat: PSIS diagnostic of the weights.
        ess: effective sample size of the weights, as a share of the draws.
        mean_shift: largest change of a mean by the smoothed weights, in deviations.
        deviation_shift: largest relative change of a deviation by the smoothed weights.
        finite: share of the draws at which the target is finite.
        finite_elbo: the ELBO over these draws alone.
        log_evidence_error: standard error of `log_evidence`.
    """

    elbo: float
    elbo_error: float
    log_evidence: float
    khat: float
    ess: float
    mean_shift: float
    deviation_shift: float
    finite: float
    finite_elbo: float
    log_evidence_error: float

    @property
    def is_good(self) -> bool:
        """Whether more training would not change the results that a user sees."""
        limit = KHAT if self.is_nearly_equal else GOOD_KHAT
        return self.is_accurate and self.khat < limit and self.ess > 0.985

    @property
    def is_nearly_equal(self) -> bool:
        """Whether weights are so nearly equal that they have hardly a tail to estimate k-hat from."""
        return self.ess > _NEARLY_EQUAL

    @property
    def is_accurate(self) -> bool:
        """Whether plain draws are accurate, according to weights that can be trusted."""
        return self.khat < KHAT and self.ess > 0.98 and self.mean_shift < 0.02 and self.deviation_shift < 0.02


class Sample(NamedTuple):
    """Draws of a fit, their log density under the fit, and clean log weights log p - log q.

    `effective` is their effective sample size; None if all draws are independent.
    """

    z: Float[np.ndarray, "n dim"]
    log_q: Float[np.ndarray, " n"]
    log_weights: Float[np.ndarray, " n"]
    effective: float | None = None


def evaluate(
    key: PRNGKeyArray, flow: AbstractBijection, target: Target, *, base: Base | None = None, n: int = EVALUATED
) -> Sample:
    """Draws from a fit, with importance weights from the target."""
    z, log_q = (np.asarray(array, float) for array in draw_in_parts(flow, key, n, base=base, mesh=target.mesh))
    return Sample(z, log_q, clean(target.programs.values(z) - log_q))


def diagnose(key: PRNGKeyArray, flow: AbstractBijection, target: Target) -> Diagnosis:
    """Diagnoses a fit from 10,000 of its draws.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr
        >>> target = ddnf.Target(lambda z: -jnp.sum(z**2) / 2, 2)
        >>> diagnose(jr.key(0), ddnf.DDNF(jr.key(1), 2), target).ess > 0.9
        True
    """
    return diagnose_sample(evaluate(key, flow, target))


def diagnose_sample(sample: Sample) -> Diagnosis:
    """The diagnosis by given draws and weights."""
    smoothed = psis(sample.log_weights)
    weights, z = np.exp(smoothed.log_weights), sample.z
    deviation = np.maximum(z.std(axis=0), 1e-300)
    mean = weights @ z
    weighted_deviation = np.sqrt(np.maximum(weights @ (z - mean) ** 2, 0))
    finite = sample.log_weights[np.isfinite(sample.log_weights)]
    share = len(finite) / len(z)
    top = finite.max()
    return Diagnosis(
        float(finite.mean()) if share == 1 else -np.inf,
        float(finite.std() / np.sqrt(len(finite))),
        float(top + np.log(np.mean(np.exp(finite - top)) * share)),
        smoothed.khat,
        effective_share(sample.log_weights),
        float(np.max(np.abs(mean - z.mean(axis=0)) / deviation)),
        float(np.max(np.abs(weighted_deviation / deviation - 1))),
        share,
        float(finite.mean()),
        float(np.sqrt(max(1 / effective_share(sample.log_weights) - 1, 0.0) / len(z))),
    )
