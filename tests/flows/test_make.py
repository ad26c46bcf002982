"""The catalog of flows: its entries, and the arguments that `make` refuses."""

import subprocess
import sys
from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from ddnf import flows
from ddnf.flows import BASELINES, DeepSigmoidal, Sylvester, make
from tests.flows.test_bijections import marked

every_baseline = pytest.mark.parametrize("name", BASELINES)
every_compiled_baseline = pytest.mark.parametrize("name", [marked(name) for name in BASELINES])


@cache
def made(name, layers):
    return make(name, jr.key(0), 2, layers=layers)


@every_compiled_baseline
def test_shapes_and_start(name):
    """Of the shape asked for, and close enough to the identity at first for its log density to be of use."""
    flow = made(name, 2)
    assert flow.shape == (2,) and flow.cond_shape is None
    x = jr.normal(jr.key(1), (20, 2))
    y, log_det = jax.jit(jax.vmap(flow.transform_and_log_det))(x)
    assert np.isfinite(y).all() and np.abs(y).max() < 2 * np.abs(x).max() + 2
    # FlowJAX's start of a block network squeezes the points; the others begin near the identity.
    assert np.median(np.abs(log_det)) < (5 if name == "bnaf" else 1)
    assert eqx.filter_eval_shape(lambda: make(name, jr.key(0), 3, condition_dim=4)).cond_shape == (4,)


@every_baseline
def test_size_is_its_width(name):
    def count(size):
        flow = eqx.filter_eval_shape(lambda: make(name, jr.key(0), 5, condition_dim=3, size=size))
        return sum(leaf.size for leaf in jax.tree.leaves(flow) if isinstance(leaf, jax.ShapeDtypeStruct))

    assert count(2) < count(4) < count(BASELINES[name].size)


@every_compiled_baseline
def test_program_does_not_grow_with_layers(name):
    def length(layers):
        return len(str(jax.make_jaxpr(made(name, layers).transform_and_log_det)(jnp.ones(2))).splitlines())

    assert length(2) == length(3)


@every_baseline
def test_entries_are_complete(name):
    baseline = BASELINES[name]
    assert baseline.title and baseline.size_means and baseline.size >= 1
    assert baseline.reference or name.startswith("affine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("glow", 2), "Expected one of affine, .*; got 'glow'"),
        (("planar", 0), "Expected dim of at least 1 for planar; got 0"),
        (("naf", 1), "Expected dim of at least 2 for naf; got 1"),
        (("planar", 2, 0), "Expected layers of at least 1; got 0"),
        (("planar", 2, 1, 0), "Expected condition_dim of at least 1; got 0"),
        (("iaf", 2, 1, None, 0), "Expected size of at least 1; got 0"),
    ],
)
def test_bad_input(arguments, message):
    name, *rest = arguments
    with pytest.raises(ValueError, match=message):
        make(name, jr.key(0), *rest)


def test_bad_sizes_of_parts():
    with pytest.raises(ValueError, match="Expected rank between 1 and dim, 2; got 3"):
        Sylvester(jr.key(0), 2, rank=3)
    with pytest.raises(ValueError, match="Expected count of at least 1; got 0"):
        DeepSigmoidal(0)


def test_documented_with_an_example():
    for name in flows.__all__:
        doc = getattr(flows, name).__doc__
        assert doc and (name in ("BASELINES", "Baseline") or ">>>" in doc)


def test_the_former_name_warns_and_works():
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import ddnf
    table = ddnf.baselines.RIVALS
    from ddnf import baselines
    from ddnf.baselines import Rival, exactly, loosely, make
assert [w.category for w in caught] == [DeprecationWarning] and "ddnf.flows" in str(caught[0].message)
assert isinstance(table["naf"], Rival) and make is ddnf.flows.make and baselines.CNF is ddnf.flows.CNF
"""
    subprocess.run([sys.executable, "-c", code], check=True)
