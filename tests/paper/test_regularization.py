"""Flows of one step for each block: fits that deceive themselves are found out."""

import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf import DDNF, certify
from ddnf.posterior import draw
from ddnf_paper import energy, regularization
from ddnf_paper.experiment import run
from ddnf_paper.plane import closeness, of_energy
from tests.paper.checks import check_shown

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("regularization")


@pytest.fixture(scope="module")
def record(folder):
    return run(regularization.EXPERIMENT, folder, profile="smoke")


def test_shown_from_json_alone(record, folder):
    check_shown(regularization.EXPERIMENT, record, folder)


def test_what_each_rule_believes(record):
    for part in record["parts"].values():
        (measured,) = part["runs"]
        if part["rule"] == "exact":
            assert measured["estimate"] == measured["exact"]
        if part["rule"] == "first order":  # tr X is never below log det(I + X) by much, and far above where it folds
            assert measured["estimate"] > measured["exact"] + 0.1


def test_counted_kl_agrees_with_quadrature():
    """Where a map does not fold, counting its draws gives the KL of its density."""
    flow = DDNF(jr.key(2), 2, blocks=2, steps=2, output_scale=0.3)
    assert certify(flow, jr.normal(jr.key(0), (500, 2))).verdict != "folds"
    kl = closeness(flow, of_energy(energy.ENERGY), *draw(flow, jr.key(3), 100)).kl
    counted = energy.binned_kl(jr.key(1), flow, draws=200_000, resolution=200)
    assert_allclose(counted, kl, rtol=0.03)


def test_stability():
    rng = np.random.default_rng(0)
    noise = regularization.stability(rng.normal(size=2000))
    assert_allclose([noise["deviation"], noise["jitter"]], 1.0, rtol=0.1)


def test_verdicts_follow_the_data(record):
    calm = dict(deviation=0.1, folded=0.0, estimate=-0.1, exact=-0.1, kl=0.1)
    parts = {
        name: part | dict(runs=[calm | dict(deviation=0.01 if part["gamma"] else 0.1)])
        for name, part in record["parts"].items()
    }
    verdicts = [claim.verdict for claim in regularization.claims(record | dict(parts=parts))]
    assert verdicts == ["not reproduced", "not reproduced", "not reproduced", "reproduced", "reproduced"]
