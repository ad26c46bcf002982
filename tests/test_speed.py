"""A guard against getting slower: ratios within one run, to a plain reference, with margins for a noisy machine."""

import jax
import pytest
from benchmarks.steps import milliseconds, plain_step, training_step

import ddnf

# What is timed is to be compiled as users have it, unlike in the other tests.
_OPTIONS = ("jax_enable_x64", "jax_disable_most_optimizations")


@pytest.fixture(autouse=True)
def optimized():
    for name in _OPTIONS:
        jax.config.update(name, False)
    yield
    for name in _OPTIONS:
        jax.config.update(name, True)


def ratio(first, second):
    ours, other = milliseconds([first.run, second.run], seconds=0.5)
    return ours / other


@pytest.mark.parametrize(
    ("size", "bound"),
    [
        # Wide on purpose: on a busy machine the ratios were about 0.009 and 0.47.
        (dict(dim=40, hidden=(2, 2)), 1 / 20),
        (dict(dim=2, hidden=(16, 16)), 1.2),
    ],
)
def test_a_training_step_is_faster_than_the_plain_one(size, bound):
    ours = training_step(ddnf.Exact(), size, 64, blocks=2, steps=4)
    plain = plain_step(size, 64, blocks=2, steps=4)
    assert ratio(ours, plain) < bound


def test_the_exact_log_det_costs_less_than_a_probe():
    size = dict(dim=40, hidden=(2, 2))
    exact = training_step(ddnf.Exact(), size, 64, blocks=2, steps=4)
    probe = training_step(ddnf.Taylor(2, probes=1), size, 64, blocks=2, steps=4)
    assert ratio(exact, probe) < 1.0
