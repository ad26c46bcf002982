"""The auto-encoder of `ddnf_paper.vae_models` in PyTorch: plain, with Zuko's flows, and with Pyro's planar flow."""

# The peers are installed in a separate environment.
# pyright: reportMissingImports=false

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyro.distributions.transforms as pyro_transforms
import torch
import zuko
from torch import nn

torch.set_num_threads(1)
PIXELS, LATENT, WIDTH, CONTEXT, WIDE = 784, 40, 128, 64, 512


class VAE(nn.Module):
    """One hidden layer of 128 tanh units in encoder and decoder; with a context, the same wide layer as ours."""

    def __init__(self, flow: Callable[[int], nn.Module] | None, *, has_context: bool):
        super().__init__()
        self.hidden, self.base = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, 2 * LATENT)
        self.wide = nn.Linear(WIDTH, WIDE) if has_context else None
        self.more = nn.Linear(WIDE, 2 * LATENT + CONTEXT) if has_context else None
        self.decoder = nn.Sequential(nn.Linear(LATENT, WIDTH), nn.Tanh(), nn.Linear(WIDTH, PIXELS))
        self.flow = None if flow is None else flow(CONTEXT if has_context else 0)

    def encode(self, x: Any) -> tuple[Any, Any]:
        hidden = torch.tanh(self.hidden(x))
        if self.wide is None or self.more is None:
            return self.base(hidden), None
        more = self.more(nn.functional.gelu(self.wide(hidden)))
        return self.base(hidden) + more[:, : 2 * LATENT], torch.tanh(more[:, 2 * LATENT :])

    def loss(self, x: Any) -> Any:
        """-ELBO with one draw per image."""
        base, context = self.encode(x)
        mean, log_scale = base.chunk(2, dim=1)
        noise = torch.randn_like(mean)
        z, log_det = mean + log_scale.exp() * noise, 0.0
        if self.flow is not None:
            z, log_det = self.flow(z, context)
        log_posterior = -noise.square().sum(1) / 2 - log_scale.sum(1) - log_det
        log_likelihood = -nn.functional.binary_cross_entropy_with_logits(self.decoder(z), x, reduction="none").sum(1)
        return (log_posterior + z.square().sum(1) / 2 - log_likelihood).mean()


class ZukoFlow(nn.Module):
    """A flow of Zuko's with a hidden layer of 128, in the direction that is fast for sampling."""

    def __init__(self, make: Callable, transforms: int, context: int):
        super().__init__()
        self.flow = make(LATENT, context, transforms=transforms, hidden_features=(WIDTH,))

    def forward(self, z: Any, context: Any) -> tuple[Any, Any]:
        return self.flow.transform(context).call_and_ladj(z)


class PyroPlanar(nn.Module):
    """Eight planar layers of Pyro's."""

    def __init__(self, context: int):
        super().__init__()
        self.layers = nn.ModuleList([pyro_transforms.Planar(LATENT) for _ in range(8)])

    def forward(self, z: Any, context: Any) -> tuple[Any, Any]:
        log_det = 0.0
        for layer in self.layers:
            y = layer(z)
            log_det = log_det + layer.log_abs_det_jacobian(z, y)
            z = y
        return z, log_det


MODELS: dict[str, Callable[[], VAE]] = {
    "PyTorch plain": partial(VAE, None, has_context=False),
    "PyTorch plain + context": partial(VAE, None, has_context=True),
    "PyTorch, Pyro planar": partial(VAE, PyroPlanar, has_context=False),
    "PyTorch, Zuko MAF + context": partial(VAE, partial(ZukoFlow, zuko.flows.MAF, 2), has_context=True),
    "PyTorch, Zuko NAF + context": partial(VAE, partial(ZukoFlow, zuko.flows.NAF, 1), has_context=True),
}


def prepare(work: str, peer: str, size: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A function that trains for `steps` steps of `batch` bytes that are re-binarised in every step."""
    torch.manual_seed(0)
    vae = MODELS[peer]()
    images = torch.as_tensor(np.random.default_rng(0).integers(0, 256, (size["images"], PIXELS), dtype=np.uint8))
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)

    def run():
        for _ in range(size["steps"]):
            rows = images[torch.randint(len(images), (size["batch"],))]
            x = (torch.rand(rows.shape) * 255 < rows).float()
            optimizer.zero_grad(set_to_none=True)
            vae.loss(x).backward()
            nn.utils.clip_grad_norm_(vae.parameters(), 200.0)
            optimizer.step()

    return run, dict(compile_seconds=0.0)
