"""Pictures of flows and densities."""
