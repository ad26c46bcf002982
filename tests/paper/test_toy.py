"""The toy experiment: who is fitted to what, and what is said of it."""

import jax
import jax.random as jr
import numpy as np
import pytest

from ddnf import DDNF
from ddnf.posterior import draw
from ddnf_paper import toy
from ddnf_paper.experiment import run
from ddnf_paper.models import MODELS, count_parameters, make
from ddnf_paper.plane import closeness, of_energy
from ddnf_paper.targets.toy import ENERGIES
from tests.paper.checks import check_shown


def test_quadrature_agrees_with_sampling():
    energy = ENERGIES["energy1"]
    flow = DDNF(jr.key(0), 2, blocks=2, steps=2, output_scale=0.3)
    z, log_q = draw(flow, jr.key(1), 20_000)
    kl, mass, _ = closeness(flow, of_energy(energy), z, log_q)
    gaps = log_q - jax.vmap(energy.log_density)(z)
    assert abs(mass - 1) < 1e-4
    assert abs(gaps.mean() - kl) < 4 * gaps.std() / np.sqrt(len(gaps))


def test_everyone_is_fitted_with_every_number_of_layers():
    parts = toy.EXPERIMENT.parts(toy.PROFILES["full"], 0)
    for energy in ("energy1", "energy2"):
        for title in MODELS.values():
            if title == "spline MAF":
                continue
            assert any(name.startswith(f"{energy}, {title}") for name in parts)
        for layers in (2, 8, 10):
            assert f"{energy}, CNF, K={layers}" in parts
    for energy in ENERGIES:
        assert f"{energy}, DDNF, (16, 16) units, K=2" in parts and f"{energy}, planar, K=10" in parts


@pytest.mark.slow
def test_equal_counts_are_equal():
    config = toy.PROFILES["full"]
    small = [build(jr.key(0)) for *_, build in toy._candidates(config, [], is_main=True) if build is not None]
    ours = [
        count_parameters(make("ddnf", jr.key(0), 2, layers=layers, settings=config.settings)) for layers in config.equal
    ]
    for wanted, planar, naf in zip(ours, small[::2], small[1::2], strict=True):
        assert abs(count_parameters(planar) - wanted) <= 2
        # A NAF of 36 parameters would have a single sigmoid, and no shape: it may have a dozen more.
        assert abs(count_parameters(naf) - wanted) <= 12


def record_of(kls):
    """A record of fits to one energy, by model and K."""
    config = dict(
        layers=[2, 10], energies=["energy1"], models=["ddnf", "ddnf-wide", "planar", "naf", "affine"], equal=[2]
    )
    parts = [
        dict(energy="energy1", model=model, layers=layers, kl=kl, is_equal=is_equal, parameters=48)
        for (model, layers, is_equal), kl in kls.items()
    ]
    return dict(config=config, parts=dict(enumerate(parts)))


KLS = {(model, layers, False): 0.01 for model in ("ddnf", "ddnf-wide", "planar", "naf") for layers in (2, 10)} | {
    ("affine", None, False): 1.7,
    ("naf", None, True): 0.5,
}


YES, PARTLY, NO = "reproduced", "partly", "not reproduced"


@pytest.mark.parametrize(
    ("change", "verdicts"),
    [
        ({}, [YES, YES, YES, YES]),
        ({("planar", 10, False): 0.2}, [PARTLY, YES, YES, YES]),
        ({("ddnf", 2, False): 0.3}, [YES, PARTLY, YES, YES]),
        ({("ddnf", 2, False): 0.3, ("naf", 2, False): 0.3}, [YES, NO, YES, NO]),
        ({("affine", None, False): 0.1, ("naf", None, True): 0.015}, [YES, YES, NO, NO]),
    ],
)
def test_verdicts_follow_from_the_data(change, verdicts):
    assert [claim.verdict for claim in toy.claims(record_of(KLS | change))] == verdicts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("toy")


@pytest.mark.slow
def test_smoke(folder):
    record = run(toy.EXPERIMENT, folder, profile="smoke")
    check_shown(toy.EXPERIMENT, record, folder)
    # So short a fit may leave the plane, but has no KL of nothing for it.
    assert all(part["kl"] > 0 for part in record["parts"].values())
    ours = record["parts"]["energy2, DDNF, (16, 16) units, K=2"]
    assert abs(ours["mass"] - 1) < 5e-3 and ours["kl"] < 0.1 and ours["verdict"] != "folds"


def test_a_gallery_has_every_k_of_a_model_side_by_side():
    """Models with every K come together, in the order of K; those with some, or without, apart."""
    named = [("ddnf", 2), ("naf", 2), ("nuts", None), ("ddnf", 8), ("planar", 2), ("planar", 8)]
    rows = [dict(model=model, layers=layers, is_equal=False) for model, layers in named]
    same_size = dict(model="planar", layers=None, is_equal=True)
    aligned, single, equal = toy._by_kind([*rows, same_size], 2)
    assert [(row["model"], row["layers"]) for row in aligned] == [
        ("ddnf", 2),
        ("ddnf", 8),
        ("planar", 2),
        ("planar", 8),
    ]
    assert [row["model"] for row in single] == ["naf", "nuts"] and equal == [same_size]
