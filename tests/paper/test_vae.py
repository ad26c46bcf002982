"""The auto-encoders of the tables: who runs, what is resumed, and what is said of it."""

import dataclasses
import json
from typing import Any

import jax.random as jr
import numpy as np
import pytest

from ddnf.vae import Encoder
from ddnf_paper import vae, vae_runs
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
    long = [name for name in names if "400 epochs" in name]
    assert len(long) == 45 and long[:2] == ["mnist-2, plain, 400 epochs, seed 0", "mnist-2, planar, 400 epochs, seed 0"]
    assert names.index("mnist-40, naf+context, 30 epochs, seed 0, rate 0.001, 256 units") < names.index(long[0])


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
    assert vae.choose(["planar"], [0], ["mnist-2"])("mnist-2, planar, 30 epochs, seed 0, rate 0.001, 8 layers")
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
    search = record["parts"]["small-2, plain, 1 epochs, seed 0, rate 0.001"]
    assert search["rate"] == 0.001 and 25 < search["valid"] < 45
    assert record["parts"]["small-2, plain, 3 epochs, seed 0"]["epochs"] == 3
    assert np.shape(record["parts"]["small-2, plain, 3 epochs, seed 0"]["plane"]["after"])[1] == 2
    short = [part for part in record["parts"].values() if part["epochs"] == 2]
    assert len(short) == 2
    for part in short:
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
        epoch_seconds=1.0, best_test=99.0, curves=dict(valid=[1.0], train=[1.0]), rate=1e-3, size=8,
    )  # fmt: skip
    parts = [
        base | dict(set=where, model=model, seed=seed, negative_elbo=value, estimate=value)
        for (where, model, seed), value in values.items()
    ]
    config = json.loads(json.dumps(dataclasses.asdict(vae.PROFILES["full"])))
    return dict(profile="full", config=config, parts={str(number): part for number, part in enumerate(parts)})


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


FULL = vae.PROFILES["full"]


def searched(model, values, where="mnist-2"):
    """Parts of the search, with validation values in the order of the candidates."""
    settings = vae_runs.candidates(FULL, model)
    runs = [vae_runs.Run(where, model, FULL.search_epochs, 0, setting) for setting in settings]
    return {run.name: dict(valid=value) for run, value in zip(runs, values, strict=True)}


@pytest.mark.parametrize(
    ("values", "rate", "size"),
    [
        ([100.0, 99.6, 99.7, 99.8, 99.9], 1e-3, 8),  # no gain of half a nat
        ([100.0, 99.4, 99.3, 99.8, 99.9], 2e-3, 8),
        ([100.0, 99.4, 99.5, 99.1, 98.9], 5e-4, 16),
        ([100.0, None, 101.0, 99.0, 99.9], 1e-3, 4),  # None: a run that failed
        ([None, 99.0, 98.0, None, None], 2e-3, 8),
    ],
)
def test_settings_change_for_clear_gains_only(values, rate, size):
    assert vae_runs.chosen(FULL, searched("planar", values), "mnist-2", "planar") == (rate, size)


def test_no_setting_before_the_search_is_complete(tmp_path):
    done = searched("planar", [100.0] * 5)
    assert vae_runs.chosen(FULL, done, "omniglot-40", "planar") is None
    del done["mnist-2, planar, 30 epochs, seed 0, rate 0.001, 16 layers"]
    assert vae_runs.chosen(FULL, done, "mnist-2", "planar") is None
    with pytest.raises(ValueError, match="Expected the search for planar to be complete"):
        vae.parts(FULL, 0)["mnist-2, planar, 400 epochs, seed 0"](tmp_path, done)


def test_long_runs_with_another_setting_are_run_again_and_not_shown():
    name = "mnist-40, planar, 400 epochs, seed 0"
    record = tables_of({("mnist-40", "planar", 0): 99.0})
    record["parts"] = {name: record["parts"]["0"] | dict(epochs=400)}
    assert ("mnist-40", 400) in vae_runs.groups(record)
    record["parts"] |= searched("planar", [100.0] * 5, "mnist-40")
    assert vae.EXPERIMENT.is_current(FULL, record["parts"], name)
    assert list(vae_runs.groups(record)) == [("mnist-40", 400)]
    record["parts"] |= searched("planar", [100.0, 100.0, 99.0, 100.0, 100.0], "mnist-40")
    assert not vae.EXPERIMENT.is_current(FULL, record["parts"], name)
    assert not vae_runs.groups(record)


def test_size_of_the_flow():
    mean = np.full(64, 0.3)
    counts = [
        count_parameters(make("ddnf", jr.key(0), latent=3, mean=mean, size=size).flow) for size in (8, 16, 32, None)
    ]
    assert counts[2] == 2 * counts[1] == 4 * counts[0] and counts[3] == counts[1]


def test_comparison_with_the_paper_is_of_the_longest_runs():
    values = {("mnist-40", "plain", seed): 100.0 + seed / 10 for seed in range(3)}
    record = tables_of(values | {("mnist-40", "ddnf+context", seed): 95.0 + seed / 10 for seed in range(3)})
    longer = tables_of({("mnist-40", "plain", 0): 97.0, ("mnist-40", "ddnf+context", 0): 93.0})
    record["parts"] |= {f"longer {name}": part | dict(epochs=400) for name, part in longer["parts"].items()}
    table = vae.EXPERIMENT.tables(record)[0]
    rows = {row[1]: row for row in table.rows}
    assert rows["DDNF + context"][3:8] == ("93.00 ± 0.10", "400", "1", "14.49", "4.00")
    assert "mnist-40, 400 epochs" in table.caption and "4.0 below the plain VAE (paper 14.5)" in table.caption
    del record["parts"]["longer 0"]
    table = vae.EXPERIMENT.tables(record)[0]
    assert "mnist-40, 100 epochs" in table.caption
    p = {row[1]: row[8] for row in table.rows}["plain VAE"]
    assert float(p) < 1e-3


def test_jumps_of_training_are_shown_where_there_are_any():
    record = tables_of({("mnist-2", "plain", 0): 100.0, ("mnist-2", "naf", 0): 97.0, ("mnist-40", "plain", 0): 90.0})
    steady, unsteady = [9.0, 5.0, 4.0, 3.5, 3.0, 2.8], [9.0, 10.0, 4.0, 3.0, 3.6, 3.4]
    for part, losses in zip(record["parts"].values(), (steady, unsteady, steady), strict=True):
        part["curves"] = dict(train=losses, valid=[3.0] * 6)
    (table,) = (table for table in vae.EXPERIMENT.tables(record) if table.caption.startswith("Stability"))
    assert table.caption.startswith("Stability of training, mnist-2")
    assert [row[:3] for row in table.rows] == [("plain VAE", "0", "0.10"), ("NAF", "1", "0.33")]
    assert "Models with jumps: NAF." in table.caption


def test_estimate_is_shown_where_it_is_another():
    record = tables_of({("mnist-40", "plain", 0): 100.0, ("mnist-40", "ddnf22+context", 0): 97.0})
    record["parts"]["1"]["estimate"] = 95.0
    table = vae.EXPERIMENT.tables(record)[0]
    assert "2 of" in table.caption
    rows = {row[0]: row for row in table.rows}
    assert "95.00" in rows["DDNF (2, 2) + context, one probe"] and rows["plain VAE"][5] == ""


@pytest.mark.slow
def test_a_model_trained_by_probes_is_judged_and_shown_without(tmp_path):
    config = dataclasses.replace(
        vae.PROFILES["smoke"], train_images=200, test_images=50, importance_draws=5, importance_images=5
    )
    part = vae.parts(dataclasses.replace(config, models=("ddnf22+context",), epochs=1), 0)
    found = part["small-2, ddnf22+context, 1 epochs, seed 0"](tmp_path, {})
    assert found["estimate"] != found["negative_elbo"]
    assert "samples" not in found  # only the paper's rows are pictured
