"""Deep diffeomorphic normalizing flows: exact, invertible, fast."""

from importlib import import_module
from typing import TYPE_CHECKING

from ddnf.density import Density, fit_density
from ddnf.flow.bijection import DDNF, Path
from ddnf.flow.certificate import Certificate, certify
from ddnf.flow.field import MLPField
from ddnf.flow.log_det import Divergence, Exact, LogDet, PrintedTaylor, Taylor, Unbiased, with_key
from ddnf.flow.regularizer import geodesic, inverse_consistency, sobolev
from ddnf.flow.scaling import ScalingField
from ddnf.flow.solver import euler, midpoint, rk4
from ddnf.posterior import Posterior, Target, fit_posterior, fit_posteriors
from ddnf.storage.models import load
from ddnf.system.cache import cache_compilation
from ddnf.training.processes import initialize
from ddnf.vae import VAE, fit_vae, judge_vae

if TYPE_CHECKING:
    from ddnf.bridges.numpyro import from_numpyro
    from ddnf.bridges.pymc import from_pymc

__version__ = "0.2.0"

__all__ = [
    "DDNF",
    "VAE",
    "Certificate",
    "Density",
    "Divergence",
    "Exact",
    "LogDet",
    "MLPField",
    "Path",
    "Posterior",
    "PrintedTaylor",
    "ScalingField",
    "Target",
    "Taylor",
    "Unbiased",
    "cache_compilation",
    "certify",
    "euler",
    "fit_density",
    "fit_posterior",
    "fit_posteriors",
    "fit_vae",
    "from_numpyro",
    "from_pymc",
    "geodesic",
    "initialize",
    "inverse_consistency",
    "judge_vae",
    "load",
    "midpoint",
    "rk4",
    "sobolev",
    "with_key",
]


# Imported on first use, because some of them need optional libraries.
_LAZY = {"from_numpyro": "ddnf.bridges.numpyro", "from_pymc": "ddnf.bridges.pymc"}
_ROOMS = ("baselines", "bridges", "cli", "density", "flow", "flows", "posterior", "storage", "training", "vae", "viz")


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _ROOMS:
        return import_module(f"ddnf.{name}")
    raise AttributeError(f"module 'ddnf' has no attribute {name!r}")
