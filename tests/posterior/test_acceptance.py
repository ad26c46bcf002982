"""What the library promises of posteriors, with default settings: slow, and worth the time."""

import os

import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddnf
from ddnf_paper.targets import cancer
from tests.models.posteriordb import POSTERIORS, data_folder, errors, reference

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fully_optimized")]


def folder():
    found = data_folder()
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("Expected the posteriordb data where CI is set; set DDNF_DATA to its folder.")
        pytest.skip("posteriordb's data are not here; set DDNF_DATA to their folder")
    return found


TABLE2, TEXTBOOK = (ddnf.Target(density, 2) for density in (cancer.table2, cancer.textbook))


def cancer_fit(target, known, seed):
    posterior = ddnf.fit_posterior(jr.key(seed), target, progress=False)
    assert posterior.khat < 0.7 and not posterior.issues
    assert_allclose(posterior.log_evidence, known["log_z"], atol=0.02)
    return posterior, np.asarray(posterior.sample(jr.key(seed + 100), 200_000))


# Among a million draws, k-hat looks further into the tail than among those that judge a fit.
@pytest.mark.filterwarnings("ignore:k-hat")
@pytest.mark.parametrize("seed", range(10))
def test_cancer_as_in_table_2(seed):
    known = cancer.REFERENCE["table2"]
    posterior, z = cancer_fit(TABLE2, known, seed)
    rate, precision = 1 / (1 + np.exp(-z[:, 0])), np.exp(z[:, 1])
    assert_allclose(rate.mean(), known["m"], rtol=0.015)
    assert_allclose(precision.mean(), known["L"], rtol=0.03)
    # L has no variance, so its mean takes many draws.
    z, weights = posterior.importance_sample(jr.key(seed + 200), 1_000_000, weighted=True)
    z, weights = np.asarray(z), np.asarray(weights)
    assert_allclose(weights @ (1 / (1 + np.exp(-z[:, 0]))), known["m"], rtol=0.01)
    assert_allclose(weights @ np.exp(z[:, 1]), known["L"], rtol=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_cancer_by_the_textbook(seed):
    known = cancer.REFERENCE["textbook"]
    _, z = cancer_fit(TEXTBOOK, known, seed)
    deviation = np.array(known["deviation"])
    assert (np.abs(z.mean(axis=0) - known["mean"]) / deviation < 0.03).all()
    assert (np.abs(z.std(axis=0) / deviation - 1) < 0.03).all()


@pytest.mark.parametrize("name", POSTERIORS)
def test_posteriordb(name):
    model = POSTERIORS[name]
    target = ddnf.from_numpyro(model.model, **model.data(folder()))
    posterior = ddnf.fit_posterior(jr.key(0), target, progress=False)
    assert posterior.khat < 0.7 and not posterior.issues
    draws = {site: np.asarray(values) for site, values in posterior.sample(jr.key(1), 20_000).items()}
    for scalar, error in errors(model.scalars(draws), reference(folder(), name)).items():
        assert error.mean < 0.05, scalar
        assert error.sd < 0.05, scalar
