"""Densities of tables."""
