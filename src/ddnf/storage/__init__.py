"""Fitted models in files: `save` and `load`."""

from ddnf.storage.models import load, save

__all__ = ["load", "save"]
