"""What DDNF is measured against: bijections of the literature, and ADVI and NUTS, under one table of names."""

from ddnf.flows.affine import DiagonalAffine, FullAffine
from ddnf.flows.householder import Householder
from ddnf.flows.ode import CNF, exactly, loosely
from ddnf.flows.planar import Planar
from ddnf.flows.radial import Radial
from ddnf.flows.sigmoidal import DeepSigmoidal
from ddnf.flows.sylvester import Sylvester
from ddnf.flows.table import RIVALS, Rival, make

__all__ = [
    "CNF",
    "RIVALS",
    "DeepSigmoidal",
    "DiagonalAffine",
    "FullAffine",
    "Householder",
    "Planar",
    "Radial",
    "Rival",
    "Sylvester",
    "exactly",
    "loosely",
    "make",
]
