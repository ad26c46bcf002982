"""Improper targets are refused; transforms that rounding cuts off are not."""

import jax.numpy as jnp
import jax.random as jr
import pytest

import ddnf
from ddnf.posterior.proper import check_proper, tail_index
from tests.models.cases import HARD


@pytest.mark.parametrize("name", ["flat", "flat in one parameter", "separable data", "upward parabola"])
def test_improper_targets_are_refused(name):
    case = HARD[name]
    with pytest.raises(ValueError, match="the posterior may be improper"):
        check_proper(jr.key(0), ddnf.Target(case.log_density, case.dim))


def test_a_flat_axis_among_many_is_found():
    with pytest.raises(ValueError, match=r"along z\[250\]"):
        check_proper(jr.key(0), ddnf.Target(lambda z: -jnp.sum(z.at[250].set(0.0) ** 2), 300))


def test_a_transform_that_is_cut_off_is_not_improper():
    """A uniform density of a probability, on the logit scale, with probabilities kept away from 0 and 1."""

    def log_density(z):
        p = jnp.clip(1 / (1 + jnp.exp(-z)), 1e-7, 1 - 1e-7)
        return jnp.sum(jnp.log(p) + jnp.log1p(-p))

    target = ddnf.Target(log_density, 2)
    check_proper(jr.key(0), target)
    assert tail_index(jr.key(0), target) == jnp.inf
