"""The toy energies have the normalizers that quadrature gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf_paper.plane import midpoint_grid
from ddnf_paper.targets.toy import ENERGIES


@pytest.mark.parametrize("name", ENERGIES)
def test_log_normalizer(name):
    energy = ENERGIES[name]
    side = energy.bound + 2
    grid, area = midpoint_grid((-side, -side), (side, side), 1500)
    potentials = jax.jit(jax.vmap(energy.potential))(jnp.asarray(grid))
    assert_allclose(jnp.log(jnp.sum(jnp.exp(-potentials)) * area), energy.log_normalizer, atol=1e-6)
    outside = np.abs(grid).max(axis=1) > energy.bound
    assert jnp.exp(-potentials[outside]).sum() * area < 1e-10


def test_formula_of_the_appendix():
    z = jnp.array([1.3, -0.4])
    expected = 0.5 * ((1.85 - 4) / 0.4) ** 2 - np.log(
        np.exp(-0.5 * ((1.3 - 2) / 0.8) ** 2) + np.exp(-0.5 * ((1.3 + 2) / 0.8) ** 2)
    )
    assert_allclose(ENERGIES["energy1"].potential(z), expected)


@pytest.mark.parametrize(
    ("name", "density"),
    [
        (
            "potential1",
            np.exp(-0.5 * ((np.hypot(1.3, -0.4) - 2) / 0.4) ** 2)
            * (np.exp(-0.5 * ((1.3 - 2) / 0.6) ** 2) + np.exp(-0.5 * ((1.3 + 2) / 0.6) ** 2)),
        ),
        ("potential2", np.exp(-0.5 * ((-0.4 - np.sin(np.pi * 1.3 / 2)) / 0.4) ** 2)),
        (
            "potential3",
            np.exp(-0.5 * ((-0.4 - np.sin(np.pi * 1.3 / 2)) / 0.35) ** 2)
            + np.exp(-0.5 * ((-0.4 - np.sin(np.pi * 1.3 / 2) + 3 * np.exp(-0.5 * (0.3 / 0.6) ** 2)) / 0.35) ** 2),
        ),
        (
            "potential4",
            np.exp(-0.5 * ((-0.4 - np.sin(np.pi * 1.3 / 2)) / 0.4) ** 2)
            + np.exp(-0.5 * ((-0.4 - np.sin(np.pi * 1.3 / 2) + 3 / (1 + np.exp(-0.3 / 0.3))) / 0.35) ** 2),
        ),
    ],
)
def test_formulas_of_rezende_and_mohamed(name, density):
    assert_allclose(ENERGIES[name].potential(jnp.array([1.3, -0.4])), -np.log(density), rtol=1e-5)
    assert ENERGIES["potential2"].potential(jnp.array([6.0, 0.0])) > 12  # a wave without end is no density
    assert np.isfinite(jax.grad(ENERGIES["potential1"].potential)(jnp.zeros(2))).all()
