"""Densities and data to fit."""
