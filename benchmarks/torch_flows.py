"""Peers in PyTorch: torchflows, Zuko and normflows, as maps of a batch with log-determinants."""

# The peers are installed in a separate environment.
# pyright: reportMissingImports=false

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import zuko

torch.set_num_threads(1)
# A step of RK4 evaluates the field four times.
RK4_STEPS = 4


class Map(NamedTuple):
    """A module, and two functions x -> (y, log det) of a batch: from noise to points and back.

    Attributes:
        draw: the first without the log-determinant, if the peer supports it.
        evaluations: evaluations of the field since the last call, if the solver is adaptive.
    """

    module: torch.nn.Module
    forward: Callable
    backward: Callable
    draw: Callable | None = None
    evaluations: Callable[[], int] | None = None


def _cells(size: dict[str, Any]) -> int:
    return size["blocks"] * size["steps"]


def torchflows_map(size: dict[str, Any], *, name: str) -> Map:
    """Its DDNF with one Euler step for each of our cells; its FFJORD with RK4 and as many evaluations."""
    from torchflows.bijections.continuous import base, ddnf, ffjord
    from torchflows.bijections.continuous.time_derivative import ConcatLinear, TimeDerivativeSequential

    event = (size["dim"],)
    if name == "DDNF":
        flow, options = ddnf.DDNF(event, n_steps=_cells(size)), {}
    else:
        # Without a step size it would take one step of RK4 for the whole way.
        flow, options = ffjord.FFJORD(event), dict(options=dict(step_size=RK4_STEPS / _cells(size)))
    # Its own constructor has no fields with one hidden layer, and always one more layer than it is told.
    widths = [size["dim"], *size["hidden"], size["dim"]]
    layers = [ConcatLinear((a,), (b,)) for a, b in pairwise(widths)]
    flow.f.forward_model = TimeDerivativeSequential(
        [part for layer in layers for part in (layer, base.TimeTanh())][:-1]
    )
    return Map(flow, lambda x: flow.inverse(x, **options), lambda x: flow.forward(x, **options))


def zuko_cnf(size: dict[str, Any], *, exact: bool) -> Map:
    """Its adaptive solver with the default tolerances; it can't be given a number of steps, so they are counted."""
    flow = zuko.flows.CNF(size["dim"], exact=exact, hidden_features=size["hidden"], activation=torch.nn.Tanh)
    calls = []
    flow.transform.ode.register_forward_pre_hook(lambda *_: calls.append(None))

    def count():
        found = len(calls)
        calls.clear()
        return found

    return Map(flow, *_of_zuko(flow), count)


def zuko_flow(size: dict[str, Any], *, make: Callable, transforms: int) -> Map:
    flow = make(size["dim"], transforms=transforms, hidden_features=(64, 64))
    return Map(flow, *_of_zuko(flow))


def _of_zuko(flow: Any) -> tuple[Callable, Callable, Callable]:
    """Its transforms go from points to noise."""
    return (
        lambda x: flow.transform().inv.call_and_ladj(x),
        lambda x: flow.transform().call_and_ladj(x),
        lambda x: flow.transform().inv(x),
    )


def residual(size: dict[str, Any]) -> Map:
    """A residual block for each of our cells, with its defaults: an unbiased estimate; quick from points to noise."""
    import normflows

    widths = [size["dim"], *size["hidden"], size["dim"]]
    layers = [
        normflows.flows.Residual(normflows.nets.LipschitzMLP(widths, init_zeros=False)) for _ in range(_cells(size))
    ]
    module = torch.nn.ModuleList(layers)

    def carry(method, parts, x):
        log_det = torch.zeros(len(x))
        for layer in parts:
            x, change = getattr(layer, method)(x)
            log_det = log_det + change
        return x, log_det

    return Map(module, partial(carry, "forward", layers), partial(carry, "inverse", layers[::-1]))


MAPS: dict[str, Callable[[dict[str, Any]], Map]] = {
    "torchflows DDNF": partial(torchflows_map, name="DDNF"),
    "torchflows FFJORD": partial(torchflows_map, name="FFJORD"),
    "Zuko CNF, exact": partial(zuko_cnf, exact=True),
    "Zuko CNF, Hutchinson": partial(zuko_cnf, exact=False),
    "normflows residual": residual,
    "Zuko NSF": partial(zuko_flow, make=zuko.flows.NSF, transforms=3),
    "Zuko NAF": partial(zuko_flow, make=zuko.flows.NAF, transforms=2),
}


def prepare(work: str, peer: str, size: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A function that does the work once, and facts about it."""
    torch.manual_seed(0)
    flow = MAPS[peer](size)
    x = torch.randn(size["batch"], size["dim"])
    run = partial(_WORKS[work], flow, x)
    facts: dict[str, Any] = dict(compile_seconds=0.0)
    if work == "step":
        facts["log_det_gradient"] = _log_det_gradient(flow, x)
    if flow.evaluations is not None:
        with torch.no_grad():
            flow.evaluations()
            (flow.backward if work == "log_prob" else flow.forward)(x)
        facts["evaluations"] = flow.evaluations()
    return run, facts


def _carry(flow: Map, x: Any) -> tuple[Any, Any]:
    """The direction in which a residual flow is fast; for the others both are the same work."""
    flow.module.train()
    flow.module.zero_grad(set_to_none=True)
    return (flow.backward if isinstance(flow.module, torch.nn.ModuleList) else flow.forward)(x)


def _step(flow: Map, x: Any) -> None:
    y, log_det = _carry(flow, x)
    (y.square().sum(1) / 2 - log_det).mean().backward()


def _log_det_gradient(flow: Map, x: Any) -> float:
    """The largest derivative of the mean log-determinant by a parameter: 0 if the peer omits its gradient."""
    _, log_det = _carry(flow, x)
    if not log_det.requires_grad:
        return 0.0
    parameters = [p for p in flow.module.parameters() if p.requires_grad]
    found = torch.autograd.grad(log_det.mean(), parameters, allow_unused=True)
    return max((float(g.abs().max()) for g in found if g is not None), default=0.0)


def _sample(flow: Map, x: Any) -> Any:
    flow.module.eval()
    with torch.no_grad():
        noise = torch.randn_like(x)
        return flow.forward(noise)[0] if flow.draw is None else flow.draw(noise)


def _log_prob(flow: Map, x: Any) -> Any:
    flow.module.eval()
    with torch.no_grad():
        z, log_det = flow.backward(x)
        return torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(1) + log_det


_WORKS = dict(step=_step, sample=_sample, log_prob=_log_prob)
