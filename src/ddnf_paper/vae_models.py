"""The auto-encoders of the paper's tables: one encoder and decoder, with different posteriors."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Float, PRNGKeyArray

from ddnf import DDNF, VAE, Taylor
from ddnf.flows import make as make_baseline
from ddnf.vae import Decoder, Encoder, Gaussian, bernoulli

CONTEXT = 64
Build = Callable[[PRNGKeyArray, int, int | None], AbstractBijection | None]


@dataclasses.dataclass(frozen=True)
class Model:
    """A posterior.

    Attributes:
        title: name in the tables.
        flow: from key, latent dimension and dimension of the context to the flow.
        has_context: whether an output of the encoder enters the flow.
    """

    title: str
    flow: Build
    has_context: bool = False


def _none(key: PRNGKeyArray, latent: int, context: int | None) -> None:
    return None


def _baseline(name: str, layers: int, size: int | None, key: PRNGKeyArray, latent: int, context: int | None):
    return make_baseline(name, key, latent, layers=layers, condition_dim=context, size=size)


def _ddnf(key: PRNGKeyArray, latent: int, context: int | None) -> DDNF:
    # Blocks of one step, each with its own field; the Lipschitz bound keeps all of them from folding.
    return DDNF(key, latent, blocks=16, steps=1, hidden=(8,), condition_dim=context, output_scale=0.3, lipschitz=0.97)


def _as_in_the_paper(key: PRNGKeyArray, latent: int, context: int | None) -> DDNF:
    # Two hidden layers of two units, trained with one probe and without a guarantee; the paper does not give K and T.
    rule = Taylor(2, probes=1)
    return DDNF(key, latent, blocks=8, steps=4, hidden=(2, 2), condition_dim=context, log_det=rule)


def _pair(name: str, title: str, flow: Build) -> dict[str, Model]:
    return {name: Model(title, flow), f"{name}+context": Model(f"{title} + context", flow, has_context=True)}


MODELS: dict[str, Model] = {
    **_pair("plain", "plain VAE", _none),
    **_pair("planar", "planar", partial(_baseline, "planar", 8, None)),
    **_pair("householder", "Householder", partial(_baseline, "householder", 8, None)),
    **_pair("sylvester", "Sylvester", partial(_baseline, "sylvester", 2, 8)),
    **_pair("iaf", "IAF", partial(_baseline, "iaf", 2, 128)),
    **_pair("naf", "NAF", partial(_baseline, "naf", 1, 128)),
    **_pair("ddnf", "DDNF", _ddnf),
    "ddnf22+context": Model("DDNF (2, 2) + context, one probe", _as_in_the_paper, has_context=True),
}


def make(
    name: str,
    key: PRNGKeyArray,
    *,
    latent: int,
    mean: Float[np.ndarray, " pixels"],
    is_binary: bool = True,
) -> VAE:
    """Builds an auto-encoder of the tables: Appendix C's networks and the posterior of this name.

    Args:
        name: name in `MODELS`.
        key: random key; models with the same key start with the same encoder and decoder.
        latent: dimension of the latent space.
        mean: the mean image, values in [0, 1].
        is_binary: whether pixels are binary; else they are real numbers.

    Example:
        >>> from ddnf_paper.models import count_parameters
        >>> vae = make("planar", jr.key(0), latent=2, mean=np.full(64, 0.5))
        >>> count_parameters(vae.flow)
        40
    """
    if name not in MODELS:
        raise ValueError(f"Expected models of {', '.join(MODELS)}; got {name!r}.")
    model = MODELS[name]
    encoder_key, decoder_key, flow_key = jr.split(key, 3)
    context = CONTEXT if model.has_context else None
    return VAE(
        Encoder(encoder_key, len(mean), latent, context=context),
        Decoder(decoder_key, latent, len(mean), mean=mean),
        model.flow(flow_key, latent, context),
        bernoulli if is_binary else Gaussian(),
    )
