"""Pictures of flows and densities: `plot` draws with Matplotlib, `view` writes pages with a flow in motion."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddnf.viz import plot as plot
    from ddnf.viz import view as view

__all__ = ["plot", "view"]
