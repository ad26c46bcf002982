"""Our auto-encoders, trained by `fit_vae` as users call it; its compiled program is the same from call to call."""

from collections.abc import Callable
from typing import Any

import jax.random as jr
import numpy as np

from ddnf import fit_vae
from ddnf_paper.vae_models import make

PIXELS, LATENT = 784, 40
MODELS = {"ours plain": "plain", "ours plain + context": "plain+context", "ours DDNF + context": "ddnf+context"}


def prepare(work: str, peer: str, size: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A function that trains for an epoch of as many images as make `steps` steps, with one image to validate on."""
    images = np.random.default_rng(0).integers(0, 256, (size["images"], PIXELS), dtype=np.uint8)
    vae = make(MODELS[peer], jr.key(0), latent=LATENT, mean=images.mean(axis=0) / 255)
    held_out = images[:1] > 127

    def run():
        rows = images[: size["steps"] * size["batch"]]
        return fit_vae(jr.key(1), vae, rows, held_out, pixels="dynamic", epochs=1, batch=size["batch"], progress=False)

    return run, {}
