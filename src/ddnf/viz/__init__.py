"""Pictures of flows and densities: `plot` draws with Matplotlib, `view` writes pages with a flow in motion."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddnf.viz import plot, view

__all__ = ["plot", "view"]


def __getattr__(name: str):
    if name in __all__:  # Matplotlib is imported when it is first used
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
