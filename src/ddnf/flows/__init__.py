"""Normalizing flows of the literature as FlowJAX bijections, with conditions, exact log-determinants and inverses.

`make` builds any of them by its name in `BASELINES`:

>>> import jax.random as jr
>>> make("naf", jr.key(0), 2, layers=4).shape
(2,)
"""

from ddnf.flows.affine import DiagonalAffine, FullAffine
from ddnf.flows.autoregressive import block, masked
from ddnf.flows.catalog import BASELINES, Baseline, make
from ddnf.flows.householder import Householder
from ddnf.flows.ode import CNF, for_evaluation, for_training
from ddnf.flows.planar import Planar
from ddnf.flows.radial import Radial
from ddnf.flows.sigmoidal import DeepSigmoidal
from ddnf.flows.sylvester import Sylvester

__all__ = [
    "BASELINES",
    "CNF",
    "Baseline",
    "DeepSigmoidal",
    "DiagonalAffine",
    "FullAffine",
    "Householder",
    "Planar",
    "Radial",
    "Sylvester",
    "block",
    "for_evaluation",
    "for_training",
    "make",
    "masked",
]
