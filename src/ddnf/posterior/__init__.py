"""Posteriors: targets, fits, their diagnosis, and what the fits are made of."""

from ddnf.posterior.diagnosis import KHAT, LostFitError, Verdict, complaints, draw, judge, log_density, log_prob
from ddnf.posterior.fit import Posterior, fit_posterior
from ddnf.posterior.importance import calibrate, effective_share, psis
from ddnf.posterior.modes import Search
from ddnf.posterior.objective import End, ReverseKL, best_gradient
from ddnf.posterior.target import Target

__all__ = [
    "KHAT",
    "End",
    "LostFitError",
    "Posterior",
    "ReverseKL",
    "Search",
    "Target",
    "Verdict",
    "best_gradient",
    "calibrate",
    "complaints",
    "draw",
    "effective_share",
    "fit_posterior",
    "judge",
    "log_density",
    "log_prob",
    "psis",
]
