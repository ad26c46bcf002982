"""What DDNF is measured against: bijections of the literature, and ADVI and NUTS, under one table of names."""

from ddnf.baselines.affine import DiagonalAffine, FullAffine
from ddnf.baselines.householder import Householder
from ddnf.baselines.ode import CNF, exactly, loosely
from ddnf.baselines.planar import Planar
from ddnf.baselines.radial import Radial
from ddnf.baselines.sigmoidal import DeepSigmoidal
from ddnf.baselines.sylvester import Sylvester
from ddnf.baselines.table import RIVALS, Rival, make

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
