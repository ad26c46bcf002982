"""The flow that is shown carries the grid and the Gaussian to its end, without folds."""

import jax
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf import DDNF
from ddnf_paper import illustration
from ddnf_paper.experiment import run
from tests.paper.checks import check_shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("illustration")


@pytest.fixture(scope="module")
def record(folder):
    return run(illustration.EXPERIMENT, folder, profile="smoke")


@pytest.mark.slow
def test_shown_from_json_alone(record, folder):
    check_shown(illustration.EXPERIMENT, record, folder)


@pytest.mark.slow
def test_the_gaussian_becomes_the_target(record):
    for part in record["parts"].values():
        assert part["times"][0] == 0 and part["times"][-1] == 2
        assert_allclose(np.array(part["grids"][0]), illustration.GRID, rtol=1e-3, atol=1e-6)
        images = part["target"], part["densities"][0], part["densities"][-1]
        target, start, end = (_shares(image) for image in images)
        assert np.abs(end - target).sum() < 0.8 * np.abs(start - target).sum()
        assert part["kl"] < 1.0 and part["determinant"] > 0


def _shares(image):
    return np.array(image) / np.sum(image)


def test_points_are_carried_to_the_end_of_the_flow():
    flow = DDNF(jr.key(0), 2, blocks=2, steps=4, output_scale=0.5)
    x = jr.normal(jr.key(1), (5, 2))
    start, middle, end = illustration.positions(flow, x, (0, 4, 8))
    assert_allclose(start, x)
    assert_allclose(end, jax.vmap(flow.transform)(x), rtol=1e-6)
    velocity = jax.tree.map(lambda leaf: leaf[0] if isinstance(leaf, jax.Array) else leaf, flow.fields)
    for _ in range(4):
        x = x + jax.vmap(velocity)(x) / 4
    assert_allclose(middle, x, rtol=1e-6)


def test_counted_pixels():
    points = np.array([[-2.99, -2.99], [2.99, -2.99], [2.99, -2.99], [9.0, 0.0]])
    image = illustration.histogram(points, 3.0)
    assert (image[0, 0], image[0, -1], image.sum()) == (1, 2, 3)
