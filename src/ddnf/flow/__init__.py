"""The DDNF bijection: velocity fields, steps, log-determinants, inverses, batches."""

from ddnf.flow import batch
from ddnf.flow.log_det import has_probes

__all__ = ["batch", "has_probes"]
