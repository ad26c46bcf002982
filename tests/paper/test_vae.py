"""The auto-encoders of the tables: who runs, what is resumed, and what is said of it."""

import dataclasses
import json
from typing import Any

import jax.random as jr
import numpy as np
import pytest

from ddnf.vae import Encoder
from ddnf_paper import vae
from ddnf_paper.experiment import run
from ddnf_paper.models import count_parameters
from ddnf_paper.targets import images
from ddnf_paper.vae_models import MODELS, make
from tests.paper.checks import check_shown


def test_other_settings():
    asked = dict(optimizer="adam", pixels="dynamic")
    assert vae.changes("full", **asked, datasets=["mnist", "omniglot-40"]) == {}
    assert vae.changes("full", optimizer="sgd", pixels="grey", datasets=[]) == dict(optimizer="sgd", pixels="grey")
    with pytest.raises(ValueError, match="Expected sets like"):
        vae.changes("full", **asked, datasets=["cifar-40"])


def test_every_run_of_the_tables():
    names = [run.name for run in vae.runs(vae.PROFILES["full"])]
    assert len(set(names)) == len(names)
    for model in MODELS:
        for where in ("mnist-40", "mnist-2", "omniglot-40"):
            assert f"{where}, {model}, 100 epochs, seed 0" in names
    for model in ("plain", "naf+context", "ddnf", "ddnf+context"):
        assert f"omniglot-40, {model}, 100 epochs, seed 2" in names
    assert "mnist-40, ddnf+context, 400 epochs, seed 0" in names


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_same_networks(name):
    mean = np.full(64, 0.3)
    model, plain = make(name, jr.key(0), latent=3, mean=mean), make("plain", jr.key(0), latent=3, mean=mean)
    assert count_parameters(model.decoder) == count_parameters(plain.decoder)
    assert isinstance(model.encoder, Encoder) and isinstance(plain.encoder, Encoder)
    assert np.array_equal(model.encoder.hidden.weight, plain.encoder.hidden.weight)
    assert (model.flow is None) == name.startswith("plain")
    if model.flow is not None:
        assert (model.flow.cond_shape is not None) == MODELS[name].has_context


def test_choice_of_runs():
    wanted = vae.choose(["plain"], [1, 2], ["mnist-2"])
    assert wanted("mnist-2, plain, 100 epochs, seed 2")
    assert not wanted("mnist-2, plain, 100 epochs, seed 0") and not wanted("mnist-40, plain, 100 epochs, seed 1")
    assert vae.choose([], [], ["mnist"])("mnist-40, naf, 400 epochs, seed 0")
    with pytest.raises(ValueError, match="Expected models of plain"):
        vae.choose(["gan"], [], [])


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The smoke profile on scikit-learn's digits, model by model, as two processes would."""
    out = tmp_path_factory.mktemp("vae")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDNF_DATA", str(out))
        for model in ("ddnf+context", "plain"):
            done = run(vae.EXPERIMENT, out, profile="smoke", wanted=vae.choose([model], [], []))
        assert images.best_at_hand() == "digits"
    assert not list((out / "vae-checkpoints").glob("*"))
    return done, out


@pytest.mark.slow
def test_smoke(record):
    record, out = record
    assert len(record["parts"]) == 2
    for part in record["parts"].values():
        assert part["images"] == "digits" and part["shape"] == [8, 8] and part["folded"] == 0
        assert len(part["curves"]["valid"]) == 2 and part["negative_log_prob"] < part["negative_elbo_there"]
        assert 25 < part["negative_elbo"] < 45
    check_shown(vae.EXPERIMENT, record, out)


def test_nothing_to_run(tmp_path):
    with pytest.raises(ValueError, match="Expected at least one part of vae"):
        run(vae.EXPERIMENT, tmp_path, profile="smoke", wanted=vae.choose(["naf"], [], []))


def tables_of(values) -> dict[str, Any]:
    """A record of runs with these -ELBOs, by set, model and seed."""
    base = dict(
        epochs=100, train_images=1, test_images=1, images="mnist", binarisation="", weighted=1, error=0.1,
        reconstruction=70.0, kl=25.0, negative_log_prob=90.0, gap=5.0, active=20, folded=0.0, parameters=1,
        epoch_seconds=1.0, best_test=99.0, curves=dict(valid=[1.0]),
    )  # fmt: skip
    parts = [
        base | dict(set=where, model=model, seed=seed, negative_elbo=value, estimate=value)
        for (where, model, seed), value in values.items()
    ]
    return dict(profile="full", parts={str(number): part for number, part in enumerate(parts)})


def test_claims_follow_the_numbers():
    good = tables_of(
        {("mnist-40", "plain", seed): 100.0 + seed / 10 for seed in range(3)}
        | {("mnist-40", "ddnf", 0): 99.0, ("mnist-40", "planar", 0): 99.5}
        | {("mnist-40", "ddnf+context", seed): 88.0 + seed / 10 for seed in range(3)}
    )
    verdicts = [claim.verdict for claim in vae.EXPERIMENT.claims(good)]
    assert verdicts == ["reproduced", "reproduced", "reproduced"]
    close = tables_of(
        {("mnist-40", "plain", 0): 95.0, ("mnist-40", "naf", 0): 94.1, ("mnist-40", "ddnf+context", 0): 94.0}
    )
    assert [claim.verdict for claim in vae.EXPERIMENT.claims(close)] == ["partly", "partly"]
    worse = tables_of(
        {("mnist-40", "plain", 0): 95.0, ("mnist-40", "ddnf", 0): 95.5, ("mnist-40", "ddnf+context", 0): 96.0}
    )
    assert {claim.verdict for claim in vae.EXPERIMENT.claims(worse)} == {"not reproduced"}
    folded = tables_of({("mnist-40", "plain", 0): 95.0, ("mnist-40", "ddnf+context", 0): 80.0})
    for part in folded["parts"].values():
        part["folded"] = 0.1
    assert vae.EXPERIMENT.claims(folded)[0].verdict == "not reproduced"


def test_estimate_is_shown_where_it_is_another():
    record = tables_of({("mnist-40", "plain", 0): 100.0, ("mnist-40", "ddnf22+context", 0): 97.0})
    record["parts"]["1"]["estimate"] = 95.0
    record["config"] = json.loads(json.dumps(dataclasses.asdict(vae.PROFILES["full"])))
    table = vae.EXPERIMENT.tables(record)[0]
    assert "2 of" in table.caption
    rows = {row[0]: row for row in table.rows}
    assert "95.00" in rows["DDNF (2, 2) + context, one probe"] and rows["plain VAE"][4] == ""


@pytest.mark.slow
def test_a_model_trained_by_probes_is_judged_and_shown_without(tmp_path):
    config = dataclasses.replace(
        vae.PROFILES["smoke"], train_images=200, test_images=50, importance_draws=5, importance_images=5
    )
    part = vae.parts(dataclasses.replace(config, models=("ddnf22+context",), epochs=1), 0)
    (found,) = (run_it(tmp_path) for run_it in part.values())
    assert found["estimate"] != found["negative_elbo"]
    assert np.shape(found["plane"]["after"])[1] == 2
