"""ArviZ gets the draws under their names, their log densities, and the figures of the fit."""

import sys
from dataclasses import replace
from types import ModuleType

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import Affine
from numpy.testing import assert_allclose

import ddnf
from ddnf.posterior import Posterior
from ddnf.posterior.export import to_arviz
from ddnf.posterior.target import Target

FIGURES = dict(elbo=-1.2, elbo_error=0.01, log_evidence=-1.1, khat=0.3, ess=0.8)


def named(z):
    return {"scale": jnp.exp(z[0]), "weights": jnp.outer(z, z)}


def log_density(z):
    return -jnp.sum((z - 1) ** 2)


def posterior(constrain=None):
    flow = Affine(jnp.ones(2), jnp.array([0.7, 0.8]))
    return Posterior(
        flow,
        Target(log_density, 2, constrain=constrain),
        **FIGURES,
        issues=(),
        losses=np.array([1.0]),
        seconds=np.array([1.0]),
    )


def test_plain_targets_give_z():
    data = to_arviz(posterior(), jr.key(0), 30)
    assert dict(data.posterior.sizes) == {"chain": 1, "draw": 30, "z_dim_0": 2}
    assert_allclose(data.posterior["z"][0], posterior().sample(jr.key(0), 30))


def test_named_draws_keep_names_and_shapes():
    data = to_arviz(posterior(named), jr.key(0), 30)
    z = to_arviz(posterior(), jr.key(0), 30).posterior["z"].values[0]
    assert set(data.posterior.data_vars) == {"scale", "weights"}
    assert data.posterior["weights"].shape == (1, 30, 2, 2)
    assert_allclose(data.posterior["scale"][0], np.exp(z[:, 0]))


def test_log_densities():
    data = to_arviz(posterior(), jr.key(0), 30)
    z, stats = data.posterior["z"].values[0], data.sample_stats
    assert_allclose(stats["lp"][0], jax.vmap(log_density)(z))
    assert_allclose(stats["log_q"][0], posterior().log_prob(jnp.asarray(z)))
    assert_allclose(stats["log_weight"], stats["lp"] - stats["log_q"])


def test_figures_are_attributes(tmp_path):
    data = to_arviz(posterior(), jr.key(0), 30)
    expected = FIGURES | {"inference_library": "ddnf", "inference_library_version": ddnf.__version__}
    for attributes in (data.attrs, data.posterior.attrs):
        assert {name: attributes[name] for name in expected} == expected
    data.to_netcdf(str(tmp_path / "fit.nc"))
    arviz = sys.modules["arviz"]
    again = arviz.from_netcdf(str(tmp_path / "fit.nc"))
    assert again.posterior.attrs["khat"] == FIGURES["khat"]
    assert list(arviz.summary(again, kind="stats").index) == ["z[0]", "z[1]"]


def test_without_its_target():
    data = to_arviz(replace(posterior(named), target=None), jr.key(0), 30)
    assert list(data.posterior.data_vars) == ["z"]
    assert list(data.sample_stats.data_vars) == ["log_q"]


def test_next_version_of_arviz(monkeypatch):
    """ArviZ 1 has no InferenceData, and takes the groups as one dictionary."""
    arviz = ModuleType("arviz")
    monkeypatch.setattr(arviz, "__version__", "1.3.0", raising=False)
    monkeypatch.setattr(arviz, "from_dict", lambda groups, attrs: (groups, attrs), raising=False)
    monkeypatch.setitem(sys.modules, "arviz", arviz)
    groups, attributes = to_arviz(posterior(), jr.key(0), 30)
    assert groups["posterior"]["z"].shape == (1, 30, 2)
    assert set(groups["sample_stats"]) == {"lp", "log_q", "log_weight"}
    assert set(attributes) == {"/", "posterior"}
    assert attributes["posterior"]["khat"] == FIGURES["khat"]


def test_needs_a_draw():
    with pytest.raises(ValueError, match="Expected n to be an integer of at least 1; got 0"):
        to_arviz(posterior(), jr.key(0), 0)
