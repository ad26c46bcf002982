"""Variational auto-encoders with any flow in the posterior: the model, its training and its evaluation."""

from ddnf.vae.fit import Pixels, Trained, fit_vae
from ddnf.vae.judge import Judged, judge_vae
from ddnf.vae.model import VAE, Code, Decoder, Encoder, Gaussian, Terms, bernoulli

__all__ = [
    "VAE",
    "Code",
    "Decoder",
    "Encoder",
    "Gaussian",
    "Judged",
    "Pixels",
    "Terms",
    "Trained",
    "bernoulli",
    "fit_vae",
    "judge_vae",
]
