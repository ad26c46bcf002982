"""The optimisation loop and its checkpoints; knows nothing of flows."""

from ddnf.training.checkpoint import remove_checkpoints
from ddnf.training.chunk import MeanLoss
from ddnf.training.devices import Devices
from ddnf.training.loop import Draw, Fit, adam, fit
from ddnf.training.processes import initialize, is_first

__all__ = ["Devices", "Draw", "Fit", "MeanLoss", "adam", "fit", "initialize", "is_first", "remove_checkpoints"]
