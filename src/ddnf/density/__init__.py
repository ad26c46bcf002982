"""Densities of tables: columns and their supports, `fit_density`, and the fitted `Density`."""

from ddnf.density.columns import Column
from ddnf.density.default import default_flow
from ddnf.density.disk import DiskTable, open_rows
from ddnf.density.fit import fit_density
from ddnf.density.result import Density
from ddnf.density.tables import READERS, open_table

__all__ = ["READERS", "Column", "Density", "DiskTable", "default_flow", "fit_density", "open_rows", "open_table"]
