"""Posteriors: a flow fitted to a density known up to a constant."""

from ddnf.posterior.calibration import Calibration, calibrate
from ddnf.posterior.convergence import Convergence, convergence
from ddnf.posterior.defaults import default_flow
from ddnf.posterior.diagnosis import KHAT, Diagnosis, diagnose
from ddnf.posterior.evaluate import LostFitError, draw, log_density, log_prob
from ddnf.posterior.export import to_arviz
from ddnf.posterior.fit import fit_posterior
from ddnf.posterior.importance import effective_share, psis
from ddnf.posterior.issues import Evidence, find_issues, gather_evidence
from ddnf.posterior.log import Log
from ddnf.posterior.many import fit_posteriors
from ddnf.posterior.objective import End, ReverseKL, best_gradient
from ddnf.posterior.polish import Chains
from ddnf.posterior.result import Posterior
from ddnf.posterior.target import Details, Target

__all__ = [
    "KHAT",
    "Calibration",
    "Chains",
    "Convergence",
    "Details",
    "Diagnosis",
    "End",
    "Evidence",
    "Log",
    "LostFitError",
    "Posterior",
    "ReverseKL",
    "Target",
    "best_gradient",
    "calibrate",
    "convergence",
    "default_flow",
    "diagnose",
    "draw",
    "effective_share",
    "find_issues",
    "fit_posterior",
    "fit_posteriors",
    "gather_evidence",
    "log_density",
    "log_prob",
    "psis",
    "to_arviz",
]
