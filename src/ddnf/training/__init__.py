"""The optimisation loop and its checkpoints; knows nothing of flows."""

from ddnf.training.checkpoint import remove_checkpoints
from ddnf.training.devices import Devices
from ddnf.training.loop import Draw, Fit, adam, fit

__all__ = ["Devices", "Draw", "Fit", "adam", "fit", "remove_checkpoints"]
