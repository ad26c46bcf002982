"""The flows of `ddnf.flows` are saved and loaded without `like=`."""

import json

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import paramax
import pytest
from flowjax import bijections as fj

import ddnf
from ddnf import flows
from ddnf.flows.parameters import stack
from ddnf.storage.description import describe, restore
from ddnf.storage.file import pack
from tests.storage.test_storage import assert_identical


def made(name, condition_dim=None, layers=2):
    return flows.make(name, jr.key(1), 3, layers=layers, condition_dim=condition_dim, size=2)


ZOO = {
    **{f"{name}, condition": lambda name=name: made(name, 2) for name in flows.BASELINES},
    **{name: lambda name=name: made(name) for name in flows.BASELINES},
    "chain": lambda: fj.Chain([made("planar"), fj.Invert(flows.Radial(jr.key(1), 3))]),
    "frozen": lambda: paramax.non_trainable(made("iaf")),
    "frozen planar": lambda: paramax.non_trainable(made("planar", 2)),
    "plain": lambda: paramax.unwrap(made("spline-iaf")),
    "scan of a DDNF": lambda: stack(jr.key(0), 3, lambda key: ddnf.DDNF(key, 2, blocks=1, steps=2, hidden=(3,))),
}
# Parts of these are in functions, which `assert_identical` cannot see into.
WITH_FUNCTIONS = [name for name in ZOO if any(part in name for part in ("iaf", "naf", "frozen", "plain"))]


def restored(flow):
    return restore(json.loads(json.dumps(describe(flow))), pack(flow))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in flows.BASELINES)) for name in ZOO]
)
def test_flows_of_the_literature_come_back(name):
    flow = ZOO[name]()
    assert_identical(restored(flow), flow)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_FUNCTIONS)
def test_same_map(name):
    flow = ZOO[name]()
    x = jnp.linspace(-2, 1, flow.shape[0])
    condition = None if flow.cond_shape is None else jnp.array([0.3, -0.7])
    expected, found = (each.transform_and_log_det(x, condition) for each in (flow, restored(flow)))
    for ours, theirs in zip(expected, found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_transformers_with_parameters_of_their_own():
    flow = flows.masked(jr.key(0), 2, transformer=fj.Affine(jnp.array(3.0)))
    with pytest.raises(ValueError, match=r"transformer has parameters.*like="):
        describe(flow)


def test_activations_of_their_own():
    network = fj.MaskedAutoregressive(
        jr.key(0), transformer=fj.Affine(), dim=2, nn_width=3, nn_depth=1, nn_activation=jnp.sin
    )
    with pytest.raises(ValueError, match=r"the activation.*like="):
        describe(network)
