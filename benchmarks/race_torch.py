"""The PyTorch side of the race: Zuko's flows, inverted for fast sampling as in its tutorial on energies.

python -m benchmarks.race_torch NAME energy1 [--limit SECONDS]
"""

# The peers are installed in a separate environment.
# pyright: reportMissingImports=false

from benchmarks import one_core

one_core.keep()

from collections.abc import Callable
from functools import partial

import torch
import zuko

from benchmarks import race
from ddnf_paper.targets.toy import ENERGIES

torch.set_num_threads(1)
SQUARED_RADIUS = dict(energy1=4.0, energy2=2.0)


def log_density(energy: str, z: torch.Tensor) -> torch.Tensor:
    """The energy of `ddnf_paper.targets.toy`, in PyTorch and for a batch."""
    ring = -(((z.square().sum(-1) - SQUARED_RADIUS[energy]) / 0.4) ** 2) / 2
    modes = torch.logaddexp(-(((z[..., 0] - 2) / 0.8) ** 2) / 2, -(((z[..., 0] + 2) / 0.8) ** 2) / 2)
    return ring + modes - ENERGIES[energy].log_normalizer


def contest(make: Callable, transforms: int, rate: race.Rate, energy: str, limit: float, seed: int) -> dict:
    torch.manual_seed(seed)
    flow = make(2, transforms=transforms, hidden_features=(64, 64))
    flow = zuko.flows.Flow(flow.transform.inv, flow.base)
    optimizer = torch.optim.Adam(flow.parameters(), lr=rate[0])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rate[1], eta_min=rate[0] / 100)
    noise = torch.as_tensor(race.noise())
    taken = dict(steps=0)

    def train():
        for _ in range(race.CHUNK):
            z, log_q = flow().rsample_and_log_prob((race.BATCH,))
            optimizer.zero_grad(set_to_none=True)
            (log_q - log_density(energy, z)).mean().backward()
            optimizer.step()
            if taken["steps"] < rate[1]:  # beyond, its cosine would rise again
                schedule.step()
            taken["steps"] += 1

    def evaluate():
        with torch.no_grad():
            z, log_det = flow().transform.inv.call_and_ladj(noise)
            log_q = torch.distributions.Normal(0.0, 1.0).log_prob(noise).sum(1) - log_det
            return float((log_q - log_density(energy, z)).mean())

    found = race.run(train, evaluate, limit=limit, compile_seconds=0.0)
    return dict(**found, rate=rate[0], horizon=rate[1])


RACERS: dict[str, Callable[[str, float, int], dict]] = {
    "Zuko NSF": partial(contest, zuko.flows.NSF, 3, (1e-2, 1500)),
    "Zuko NAF": partial(contest, zuko.flows.NAF, 2, (1e-2, 1500)),
}

if __name__ == "__main__":
    race.main(RACERS)
