"""The conclusions of the benchmarks from a record, without running them; and their files."""

import json
from pathlib import Path

import jax.random as jr
import pytest
from benchmarks import calibration, report, roofline, summary
from numpyro import handlers


def part(*rows):
    return dict(command="python -m benchmarks", date="2026-01-01", rows=list(rows))


def step(peer, seconds, **more):
    return dict(work="step", peer=peer, dim=2, hidden=[2, 2], blocks=8, steps=8, batch=256, seconds=seconds, **more)


@pytest.fixture
def record():
    steps = [step("ours", 0.001), step("torchflows DDNF", 0.02), step("Zuko CNF, exact", 0.1, evaluations=128)]
    growth = [dict(axis="steps", steps=n, seconds=0.01 * n, bytes=100) for n in (2, 4, 8)]
    race = [
        dict(peer=peer, energy="energy1", seed=seed, seconds=seconds, reached=seconds < 30, limit=30.0, kl=0.01)
        for peer, times in {"ours": (5, 6, 30), "planar": (4, 30, 30)}.items()
        for seed, seconds in enumerate(times)
    ]
    parts = dict(steps=part(*steps), growth=part(*growth))
    return dict(command="make bench", python="3", machine="any", versions={}, parts=parts | dict(race=part(*race)))


def verdict(record, words):
    return next(v for v in summary.verdicts(record) if words in v.asked)


def test_ratios_are_at_equal_evaluations(record):
    assert verdict(record, "torchflows") == (verdict(record, "torchflows").asked, "20 times", False)
    assert verdict(record, "Zuko").met and verdict(record, "Zuko").measured == "50 times"


def test_slopes(record):
    assert summary.slope(record, "steps") == pytest.approx(1.0)
    assert summary.slope(record, "steps", "bytes") == pytest.approx(0.0)
    assert verdict(record, "linear in K").met is None


def test_who_does_not_get_there_with_most_seeds_has_not_won(record):
    assert summary.race_order(record, "energy1") == [(6, "ours")]
    assert verdict(record, "energy1").met


def test_the_page_needs_no_part(record, tmp_path):
    record["parts"]["steps"]["rows"].append(dict(peer="other", dim=2, hidden=[2, 2], error="no memory"))
    written = report.write(json.loads(json.dumps(record)), tmp_path)
    assert all(Path(path).exists() for path in written)
    assert "no memory" in written[0].read_text()


def test_result_files_are_strict_json():
    """No bare NaN or Infinity: other languages, and browsers, cannot read them."""

    def refuse(constant):
        raise AssertionError(constant)

    root = Path(__file__).parents[1]
    paths = [*(root / "results").glob("*.json"), *(root / "benchmarks").glob("*.json")]
    assert len(paths) > 10
    for path in paths:
        json.loads(path.read_text(), parse_constant=refuse)


def test_products_go_round_the_narrowest_layer():
    assert roofline.products(40, (64, 64), 10)[3:] == [(64, 64, 400), (40, 64, 400)]
    assert roofline.backward((2, 3, 4)) == [(3, 2, 4), (2, 4, 3)]


@pytest.mark.parametrize("name", calibration.MODELS)
def test_calibration_ranks_the_parameters_of_its_models(name):
    """The truth has one entry for each scalar of the sites, in their order, and the model takes the data."""
    model = calibration.MODELS[name]
    truth, data = model.simulate(jr.key(0))
    trace = handlers.trace(handlers.seed(model.model, 0)).get_trace(*data)
    sites = {site: entry for site, entry in trace.items() if not entry["is_observed"]}
    assert tuple(sites) == model.sites and trace["y"]["value"].shape == data[0].shape
    assert len(truth) == sum(entry["value"].size for entry in sites.values())
    assert truth[model.sites.index("tau")] > 0
