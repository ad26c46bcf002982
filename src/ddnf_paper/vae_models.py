"""The auto-encoders of the paper's tables: one encoder and decoder, with different posteriors."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Float, PRNGKeyArray

from ddnf import DDNF, VAE, Taylor
from ddnf.flows import make as make_baseline
from ddnf.vae import Decoder, Encoder, Gaussian, bernoulli

CONTEXT = 64
Build = Callable[[PRNGKeyArray, int, int | None, Any], AbstractBijection | None]


@dataclasses.dataclass(frozen=True)
class Model:
    """A posterior.

    Attributes:
        title: name in the tables.
        flow: from key, latent dimension, dimension of the context and size to the flow.
        size: default size of the flow, which a search may change; None without a flow.
        unit: what the size counts.
        has_context: whether an output of the encoder enters the flow.
    """

    title: str
    flow: Build
    size: int | None = None
    unit: str = ""
    has_context: bool = False


def _none(key: PRNGKeyArray, latent: int, context: int | None, size: int | None) -> None:
    return None


def _layers(name: str, key: PRNGKeyArray, latent: int, context: int | None, size: int):
    return make_baseline(name, key, latent, layers=size, condition_dim=context)


def _wide(name: str, layers: int, key: PRNGKeyArray, latent: int, context: int | None, size: int):
    return make_baseline(name, key, latent, layers=layers, condition_dim=context, size=size)


def _ddnf(key: PRNGKeyArray, latent: int, context: int | None, size: int) -> DDNF:
    # Blocks of one step, each with its own field; the Lipschitz bound keeps all of them from folding.
    return DDNF(key, latent, blocks=size, steps=1, hidden=(8,), condition_dim=context, output_scale=0.3, lipschitz=0.97)


def _as_in_the_paper(key: PRNGKeyArray, latent: int, context: int | None, size: int) -> DDNF:
    # Two hidden layers of two units, trained with one probe and without a guarantee; the paper does not give K and T.
    rule = Taylor(2, probes=1)
    return DDNF(key, latent, blocks=size, steps=4, hidden=(2, 2), condition_dim=context, log_det=rule)


def _pair(name: str, title: str, flow: Callable, size: int | None = None, unit: str = "") -> dict[str, Model]:
    return {
        name: Model(title, flow, size, unit),
        f"{name}+context": Model(f"{title} + context", flow, size, unit, has_context=True),
    }


MODELS: dict[str, Model] = {
    **_pair("plain", "plain VAE", _none),
    **_pair("planar", "planar", partial(_layers, "planar"), 8, "layers"),
    **_pair("householder", "Householder", partial(_layers, "householder"), 8, "reflections"),
    **_pair("sylvester", "Sylvester", partial(_wide, "sylvester", 2), 8, "columns"),
    **_pair("iaf", "IAF", partial(_wide, "iaf", 2), 128, "units"),
    **_pair("naf", "NAF", partial(_wide, "naf", 1), 128, "units"),
    **_pair("ddnf", "DDNF", _ddnf, 16, "blocks"),
    "ddnf22+context": Model("DDNF (2, 2) + context, one probe", _as_in_the_paper, 8, "blocks", has_context=True),
}


def make(
    name: str,
    key: PRNGKeyArray,
    *,
    latent: int,
    mean: Float[np.ndarray, " pixels"],
    is_binary: bool = True,
    size: int | None = None,
) -> VAE:
    """Builds an auto-encoder of the tables: Appendix C's networks and the posterior of this name.

    Args:
        name: name in `MODELS`.
        key: random key; models with the same key start with the same encoder and decoder.
        latent: dimension of the latent space.
        mean: the mean image, values in [0, 1].
        is_binary: whether pixels are binary; else they are real numbers.
        size: of the flow; None for the model's default.

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
        model.flow(flow_key, latent, context, model.size if size is None else size),
        bernoulli if is_binary else Gaussian(),
    )
