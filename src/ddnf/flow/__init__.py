"""The mathematics of the flow, on one point."""
