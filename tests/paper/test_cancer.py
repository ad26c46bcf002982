"""The cancer posterior against quadrature and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.special import betaln

from ddnf_paper.targets import cancer


def by_scipy(z):
    m, precision = 1 / (1 + np.exp(-z[0])), np.exp(z[1])
    a, b, y, n = precision * m, precision * (1 - m), cancer.DEATHS, cancer.AT_RISK
    likelihood = np.sum(betaln(a + y, b + n - y) - betaln(a, b))
    return likelihood - np.log(m * (1 - m)) - 2 * np.log1p(precision)


@pytest.mark.parametrize("z", [(-6.7, 6.8), (-7.0, 12.0), (-6.0, 2.0), (-8.0, 0.0), (-3.0, -3.0)])
def test_agrees_with_scipy(z):
    z = np.array(z)
    assert_allclose(cancer.table2(jnp.asarray(z)), by_scipy(z), atol=1e-7)
    assert_allclose(cancer.table2(jnp.asarray(z, jnp.float32)), by_scipy(z), atol=0.01)
    m, precision = 1 / (1 + np.exp(-z[0])), np.exp(z[1])
    assert_allclose(cancer.textbook(jnp.asarray(z)), by_scipy(z) + np.log(m * (1 - m) * precision), atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table2", "textbook"])
def test_reference_values(name):
    known = cancer.REFERENCE[name]
    first, second = np.linspace(-13.0, 6.0, 1200), np.linspace(-8.0, 40.0, 1000)
    grid = np.stack(np.meshgrid(first, second, indexing="ij"), axis=-1).reshape(-1, 2)
    log_p = np.asarray(jax.jit(jax.vmap(getattr(cancer, name)))(jnp.asarray(grid)))
    area = (first[1] - first[0]) * (second[1] - second[0])
    weights = np.exp(log_p - log_p.max())
    assert_allclose(np.log(weights.sum() * area) + log_p.max(), known["log_z"], atol=1e-3)
    weights /= weights.sum()
    mean = weights @ grid
    assert_allclose(mean, known["mean"], atol=2e-3)
    assert_allclose(np.sqrt(weights @ (grid - mean) ** 2), known["deviation"], rtol=2e-3)
    assert_allclose(weights @ (1 / (1 + np.exp(-grid[:, 0]))), known["m"], rtol=1e-3)
    if known["L"] is not None:
        assert_allclose(weights @ np.exp(grid[:, 1]), known["L"], rtol=2e-3)
