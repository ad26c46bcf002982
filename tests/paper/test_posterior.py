"""The cancer posterior: quadrature gives the known values, DDNF comes near them, and verdicts follow the data."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf_paper import posterior, posterior_claims
from ddnf_paper.experiment import run
from ddnf_paper.targets import cancer
from tests.paper.checks import check_shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("posterior")


@pytest.fixture(scope="module")
def record(folder):
    return run(posterior.EXPERIMENT, folder, profile="smoke")


def of(record, method):
    (found,) = record["parts"][f"table2, {method}"]["runs"]
    return found


@pytest.mark.slow
def test_shown_from_json_alone(record, folder):
    check_shown(posterior.EXPERIMENT, record, folder)


@pytest.mark.slow
def test_ours_is_near_and_planar_is_not(record):
    truth, ours, planar = (of(record, method) for method in ("quadrature", "DDNF", "planar"))
    assert abs(ours["m"] / truth["m"] - 1) < 0.02
    assert abs(ours["L"] / truth["L"] - 1) < 0.1
    assert abs(ours["weighted_m"] / truth["m"] - 1) < 0.02
    assert abs(ours["weighted_L"] / truth["L"] - 1) < 0.05
    assert ours["kl"] < 0.005 < planar["kl"]


@pytest.mark.slow
def test_chains_agree_with_quadrature(record):
    truth, chains = of(record, "quadrature"), of(record, "MCMC")
    for name in ("logit_m", "log_L"):
        deviation = truth[f"{name}_sd"]
        assert abs(chains[name] - truth[name]) < 5 * deviation / np.sqrt(chains["effective"])
    assert chains["r_hat"] < 1.02


def test_quadrature_gives_the_known_values():
    quantiles = dict(table2=(172.7, 853.8, 4734.5), textbook=(386.6, 2340.8, 37760))
    for name, known in cancer.REFERENCE.items():
        truth = posterior._truth(name)
        (found,) = truth["runs"]
        assert_allclose([found["logit_m"], found["log_L"]], known["mean"], rtol=1e-4)
        assert_allclose([found["logit_m_sd"], found["log_L_sd"]], known["deviation"], rtol=1e-3)
        assert_allclose(found["m"], known["m"], rtol=1e-4)
        assert_allclose([found["low"], found["median"], found["high"]], quantiles[name], rtol=5e-4)
        assert found["L"] is None if known["L"] is None else abs(found["L"] / known["L"] - 1) < 1e-4
        for curve in ("logit_m_curve", "log_L_curve"):
            x, density = truth[curve]
            assert 0.99 < np.trapezoid(density, x) < 1


def test_figures_of_known_draws():
    """If log L is normal, E[L] is exp(mean + variance / 2)."""
    log_L = np.random.default_rng(0).normal(7.0, 0.5, 200_000)
    found = posterior.figures(np.stack([np.full_like(log_L, np.log(0.25 / 0.75)), log_L], axis=1))
    assert_allclose(found["m"], 0.25)
    assert_allclose(found["L"], np.exp(7 + 0.125), rtol=0.01)
    assert_allclose(
        [found["low"], found["median"], found["high"]], np.exp(7 + 0.5 * 1.645 * np.array([-1, 0, 1])), rtol=0.01
    )


def made(method, target="table2", **figures):
    """A part with two repetitions of these figures."""
    return dict(target=target, method=method, runs=[figures, figures])


def record_of(*parts, targets=("table2",)):
    truth = made("quadrature", m=1296.5e-6, L=1567.0), made("quadrature", "textbook", m=1147.4e-6, L=None)
    config = dict(repetitions=2, targets=list(targets))
    return dict(config=config, parts={f"{part['target']}, {part['method']}": part for part in (*truth, *parts)})


def verdicts(*parts, targets=("table2",)):
    return [claim.verdict for claim in posterior_claims.claims(record_of(*parts, targets=targets))]


def test_verdicts_follow_the_data():
    ours = made("DDNF", kl=0.001, m=1296e-6, L=1560.0, weighted_m=1296e-6, weighted_L=1567.0)
    poor = made("DDNF", kl=1.0, m=1400e-6, L=900.0, weighted_m=1296e-6, weighted_L=1567.0)
    planar = made("planar", kl=0.2, m=1350e-6, L=1300.0)
    assert verdicts(ours, planar) == ["reproduced"] * 4
    assert verdicts(poor, planar) == ["not reproduced"] * 4
    # A planar flow that was lost is none that is closer.
    assert verdicts(ours, made("planar", lost=True, seconds=1.0)) == ["reproduced"] * 4
    naf = [made("NAF", kl=kl) for kl in (1.0, 0.01)]
    assert [verdicts(part) for part in naf] == [["reproduced"], ["not reproduced"]]
    row = [made("MCMC", m=1295e-6, L=L) for L in (1500.0, 1300.0)]
    assert [verdicts(part) for part in row] == [["reproduced"], ["partly"]]
    assert verdicts(targets=("table2", "textbook")) == ["not reproduced"]


def test_a_figure_that_overflowed_is_left_out():
    part = dict(runs=[dict(L=None), dict(L=1.0)])
    assert posterior_claims.spread(part, "L") == "1 ± 0, 1 of 2"
