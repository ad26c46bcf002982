"""The erratum by its orders, and fits over T, norms and solvers."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf_paper import open_questions
from ddnf_paper.experiment import run
from tests.paper.checks import check_shown

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("open")


@pytest.fixture(scope="module")
def record(folder):
    return run(open_questions.EXPERIMENT, folder, profile="smoke")


def test_shown_from_json_alone(record, folder):
    check_shown(open_questions.EXPERIMENT, record, folder)


def test_orders_of_the_log_determinants(record):
    part = record["parts"]["log-det errors"]
    for rule, expected in open_questions.ORDERS.items():
        found = open_questions.order(np.array(part["dt"]), np.array(part["errors"][rule]))
        assert_allclose(found, expected, atol=0.15)


def test_solvers_cost_the_same(record):
    found = [part for part in record["parts"].values() if part["kind"] == "solver"]
    costs = {part["solver"]: part["steps"] * open_questions.SOLVERS[part["solver"]][1] for part in found}
    assert costs == dict.fromkeys(open_questions.SOLVERS, record["config"]["evaluations"])
    assert all(run["estimate"] == run["exact"] for part in found for run in part["runs"])
