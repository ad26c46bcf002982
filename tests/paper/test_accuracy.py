"""Orders of the solvers, and the inverse, as the experiment measures them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf_paper import accuracy
from ddnf_paper.experiment import run
from tests.paper.checks import check_shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("accuracy")


@pytest.fixture(scope="module")
def record(folder):
    return run(accuracy.EXPERIMENT, folder, profile="smoke")


@pytest.mark.slow
def test_shown_from_json_alone(record, folder):
    check_shown(accuracy.EXPERIMENT, record, folder)


@pytest.mark.slow
def test_slopes(record):
    steps = np.array(record["config"]["steps"])
    for name, part in record["parts"].items():
        forward, reverse = (np.mean(part[kind], axis=1) for kind in ("forward", "reverse"))
        assert_allclose(accuracy.slope(steps, forward), accuracy.FORWARD_SLOPES[name], rtol=0.1)
        assert_allclose(accuracy.slope(steps, reverse), accuracy.REVERSE_SLOPES[name], rtol=0.15)


@pytest.mark.slow
def test_exact_inverse_where_nothing_folds(record):
    for part in record["parts"].values():
        exact = np.array(part["exact"], float)
        assert_allclose(np.mean(np.isnan(exact), axis=1), part["folds"])
        assert np.isfinite(exact[-1]).all() and np.nanmax(exact) < 1e-20


def test_slope_leaves_out_rounding():
    steps = np.array([1, 16, 32, 64, 128])
    errors = np.array([9.0, *(1.0 / steps[1:-1] ** 8), 1e-28])
    assert_allclose(accuracy.slope(steps, errors), -8)
    assert np.isnan(accuracy.slope(steps, np.zeros(5)))


@pytest.mark.slow
def test_verdicts_follow_the_data(record):
    """A backward pass that goes astray is not called accurate."""
    part = record["parts"]["euler"]
    worse = record | dict(parts=record["parts"] | dict(euler=part | dict(reverse=np.ones_like(part["reverse"]))))
    verdicts = [claim.verdict for claim in accuracy.claims(worse)]
    assert verdicts[:2] == ["not reproduced", "not reproduced"]
    assert accuracy.claims(record)[0].verdict == "reproduced"


def test_precision_of_others_stays():
    with jax.enable_x64(False):
        config = accuracy.Config(flows=1, points=2, steps=(16,))
        assert accuracy.parts(config, 0)["euler"]()["forward"].dtype == np.float64
        assert jnp.ones(1).dtype == np.float32
