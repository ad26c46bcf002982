"""The table of bijections: a new one is one row, and passes the checks of every row."""

from functools import partial

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr

from ddnf import DDNF, ScalingField, midpoint, rk4


class TurningField(eqx.Module):
    """A field of one's own, with parameters: a turn whose speed depends on the distance."""

    speed: jnp.ndarray

    def __init__(self, key):
        self.speed = jr.normal(key, ())

    def __call__(self, z, condition):
        return self.speed * jnp.array([-z[1], z[0]]) / (1 + z @ z)


def _flow(dim, *, blocks=2, steps=3, output_scale=0.5, **options):
    return lambda: DDNF(jr.key(7), dim, blocks=blocks, steps=steps, output_scale=output_scale, **options)


BIJECTIONS = {
    "plane": _flow(2),
    "paper": _flow(3, hidden=(2, 2), blocks=3),
    "line": _flow(1, hidden=(5,)),
    "deep gelu": _flow(5, hidden=(7, 3, 6), activation="gelu"),
    "rank 8 softplus": _flow(9, hidden=(20, 8, 20), activation="softplus"),
    "rank 18 sin": _flow(20, hidden=(18,), activation="sin", blocks=1),
    "condition": _flow(3, condition_dim=2),
    "condition, rank 2": _flow(4, hidden=(6, 2, 6), condition_dim=3, context_rank=2),
    "condition, rank 5 swish": _flow(
        6, hidden=(5,), condition_dim=3, context_rank=1, activation="swish", output_scale=0.2
    ),
    "midpoint": _flow(2, solver=midpoint),
    "rk4, condition": _flow(2, solver=rk4, condition_dim=2),
    "guaranteed": _flow(3, output_scale=5.0, lipschitz=0.8),
    "guaranteed, condition": _flow(2, output_scale=5.0, lipschitz=0.8, condition_dim=2, context_rank=1),
    "scaling": _flow(4, field=partial(ScalingField, dim=4, units=2, output_scale=0.3)),
    "scaling, condition": _flow(
        6, field=partial(ScalingField, dim=6, units=5, condition_dim=2, output_scale=0.2), condition_dim=2
    ),
    "own module": _flow(2, field=TurningField),
    "own function": _flow(3, field=lambda key: lambda z, condition: jnp.sin(z[::-1]) / 2),
}


def points(flow, n=6, seed=0, dtype=jnp.float64):
    """Points and conditions (None for a flow without) for a flow."""
    x = jr.normal(jr.key(seed), (n, *flow.shape), dtype)
    condition = None if flow.cond_shape is None else jr.normal(jr.key(seed + 1), (n, *flow.cond_shape), dtype)
    return x, condition
