"""Bridges to NumPyro, PyMC and scikit-learn; each imports its library when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddnf.bridges import numpyro, pymc, sklearn

__all__ = ["numpyro", "pymc", "sklearn"]


def __getattr__(name: str):
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
