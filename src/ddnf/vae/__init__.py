"""Auto-encoders with a flow as the posterior of their latent variables."""
