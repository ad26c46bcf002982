"""The regularizer draws the backward pass by -v closer to the inverse."""

import numpy as np
import pytest

from ddnf_paper import inverse_consistency
from ddnf_paper.experiment import run
from tests.paper.checks import check_shown

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("consistency")


@pytest.fixture(scope="module")
def record(folder):
    return run(inverse_consistency.EXPERIMENT, folder, profile="smoke")


def test_shown_from_json_alone(record, folder):
    check_shown(inverse_consistency.EXPERIMENT, record, folder)


def test_regularizer_acts(record):
    misses = {(part["rule"], part["gamma"]): part["runs"][0]["reverse"] for part in record["parts"].values()}
    for rule in record["config"]["rules"]:
        assert misses[rule, 10.0] < 0.5 * misses[rule, 0.0]


def test_exact_inverse(record):
    for part in record["parts"].values():
        (measured,) = part["runs"]
        assert (measured["exact"] is None) == (measured["verdict"] == "folds")
        assert measured["exact"] is None or measured["exact"] < 1e-5


def test_arrows_are_what_is_averaged(record):
    start = inverse_consistency.arrow_starts()
    for part in record["parts"].values():
        mean = np.mean(np.linalg.norm(np.array(part["arrows"]) - start, axis=1))
        np.testing.assert_allclose(mean, part["runs"][0]["reverse_grid"], rtol=1e-3)
