"""Posteriors: a flow fitted to a density known up to a constant."""
