"""The evidence of a target by bridge sampling between draws of a fit and of Markov chains."""

from typing import NamedTuple

import numpy as np

from ddnf.posterior.diagnosis import Sample
from ddnf.posterior.polish import Chains

# Effective number of terms of a mean below which its variance is not known.
_LEAST_TERMS = 10


class Bridge(NamedTuple):
    """The log of a target's integral, and its standard error."""

    log_evidence: float
    error: float


def bridge(sample: Sample, chains: Chains) -> Bridge:
    """Bridge sampling with the optimal bridge (Meng and Wong, 1996), and its error (Fruehwirth-Schnatter, 2004).

    With log weights log p - log q at draws of the fit q and of the target p, the evidence r solves

        r = mean_q[w / (s w + (1 - s) r)] / mean_p[1 / (s w + (1 - s) r)]

    with s the share of the chains' effective draws among all. Importance sampling is the case without chains. The error
    is infinite where fit and target hardly overlap, so that few terms make up one of the means.
    """
    fitted = sample.log_weights
    exact = chains.log_weights.ravel().astype(float)
    exact = exact[np.isfinite(exact)]
    effective = min(chains.ess, chains.weights_convergence.ess_bulk[0], len(exact))
    share = effective / (effective + len(fitted))
    # Weights are scaled by a typical weight to avoid overflow.
    center = float(np.median(exact))
    w_fitted, w_exact = (np.exp(np.clip(log_w - center, -700, 300)) for log_w in (fitted, exact))

    def terms(ratio):
        return w_fitted / (share * w_fitted + (1 - share) * ratio), 1 / (share * w_exact + (1 - share) * ratio)

    ratio = 1.0
    for _ in range(1000):
        upper, lower = terms(ratio)
        before, ratio = ratio, upper.mean() / lower.mean()
        if abs(ratio - before) < 1e-10 * ratio:
            break
    upper, lower = terms(ratio)
    if min(_effective(upper), _effective(lower) * effective / len(exact)) < _LEAST_TERMS:
        return Bridge(float(center + np.log(ratio)), float("inf"))
    variance = upper.var() / upper.mean() ** 2 / len(fitted) + lower.var() / lower.mean() ** 2 / effective
    return Bridge(float(center + np.log(ratio)), float(np.sqrt(variance)))


def _effective(terms) -> float:
    return float(terms.sum() ** 2 / np.sum(terms**2))
