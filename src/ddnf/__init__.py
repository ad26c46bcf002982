"""Deep diffeomorphic normalizing flows: exact, invertible, fast."""

from ddnf.flow.bijection import DDNF, Path
from ddnf.flow.certificate import Certificate, certify
from ddnf.flow.field import MLPField
from ddnf.flow.log_det import Divergence, Exact, LogDet, PrintedTaylor, Taylor, Unbiased, with_key
from ddnf.flow.regularizer import geodesic, inverse_consistency, sobolev
from ddnf.flow.solver import euler, midpoint, rk4

__version__ = "0.1.0"

__all__ = [
    "DDNF",
    "Certificate",
    "Divergence",
    "Exact",
    "LogDet",
    "MLPField",
    "Path",
    "PrintedTaylor",
    "Taylor",
    "Unbiased",
    "certify",
    "euler",
    "geodesic",
    "inverse_consistency",
    "midpoint",
    "rk4",
    "sobolev",
    "with_key",
]
