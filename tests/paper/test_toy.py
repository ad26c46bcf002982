"""The toy experiment runs small from end to end, and its fit improves on no fit."""

import json

import jax
import jax.random as jr
import numpy as np
from flowjax.distributions import StandardNormal, Transformed

from ddnf import DDNF
from ddnf.inference.diagnostics import kl_by_quadrature
from ddnf.paper import toy
from ddnf.targets.toy import ENERGIES


def test_fit_comes_close():
    config = toy.Config("energy2", blocks=2, hidden=(16, 16), steps=4, iterations=1500, resolution=120)
    result = toy.measure(toy.fit(config, progress=False), config)
    assert abs(result["mass"] - 1) < 5e-3
    assert result["verdict"] != "folds"
    assert result["kl"] < 0.1


def test_quadrature_agrees_with_sampling():
    energy = ENERGIES["energy1"]
    q = Transformed(StandardNormal((2,)), DDNF(jr.key(0), 2, blocks=2, steps=2, output_scale=0.3))
    kl, mass = kl_by_quadrature(q.log_prob, energy.log_density, bound=8.0, resolution=200)
    x, log_q = q.sample_and_log_prob(jr.key(1), (20_000,))
    gaps = log_q - jax.vmap(energy.log_density)(x)
    assert abs(mass - 1) < 1e-6
    assert abs(gaps.mean() - kl) < 4 * gaps.std() / np.sqrt(len(gaps))


def test_writes_what_it_says(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(toy, "CONFIGS", {"small": dict(blocks=1, hidden=(2,))})
    toy.main(["--out", str(tmp_path), "--iterations", "40", "--resolution", "40"])
    record = json.loads((tmp_path / "toy.json").read_text())
    assert [r["config"]["energy"] for r in record["results"]] == list(ENERGIES)
    assert all(np.isfinite(r["kl"]) for r in record["results"])
    assert (tmp_path / "toy.png").stat().st_size > 10_000
    assert str(tmp_path / "toy.png") in capsys.readouterr().out
