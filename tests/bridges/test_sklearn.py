"""The scikit-learn estimator: its own checks, and what people do with estimators."""

import pickle

import joblib
import numpy as np
import pandas as pd
import pytest
import sklearn
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from ddnf.bridges.sklearn import DDNFDensity

ROWS = np.random.default_rng(0).normal(size=(40, 2)) * [1.0, 3.0] + [0.0, 5.0]


def tiny(**options):
    return DDNFDensity(**dict(blocks=1, hidden=(2,), steps=5, random_state=0) | options)


@pytest.mark.filterwarnings("ignore:Column .* has ties")  # as the tables of some checks have
@parametrize_with_checks([tiny(random_state=None)])
def test_its_own_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def model():
    return tiny().fit(ROWS)


def test_score_is_the_log_likelihood_of_all_rows(model):
    scores = model.score_samples(ROWS)
    assert scores.dtype == np.float64 and scores.shape == (40,)
    assert isinstance(model.score(ROWS), float)
    assert_allclose(model.score(ROWS), scores.sum(), rtol=1e-12)
    assert_allclose(scores, model.density_.log_prob(ROWS), rtol=1e-12)


def test_draws(model):
    assert model.sample().shape == (1, 2)
    draws = model.sample(30, random_state=3)
    assert draws.dtype == np.float64 and draws.shape == (30, 2)
    assert_array_equal(draws, model.sample(30, random_state=3))
    assert_array_equal(draws, model.sample(30, random_state=np.random.RandomState(3)))
    state = np.random.RandomState(3)
    assert not np.array_equal(model.sample(30, state), model.sample(30, state))
    np.random.seed(3)
    assert_array_equal(draws, model.sample(30))


def test_random_states(model):
    scores = model.score_samples(ROWS)
    assert_array_equal(tiny().fit(ROWS).score_samples(ROWS), scores)
    assert_array_equal(tiny(random_state=np.random.RandomState(0)).fit(ROWS).score_samples(ROWS), scores)
    assert not np.array_equal(tiny(random_state=1).fit(ROWS).score_samples(ROWS), scores)


def test_pickled(model):
    copy = pickle.loads(pickle.dumps(model))
    assert_array_equal(copy.score_samples(ROWS), model.score_samples(ROWS))
    assert_array_equal(copy.sample(3, random_state=0), model.sample(3, random_state=0))


def test_cloned():
    model = tiny(support={0: "positive"})
    copy = clone(model.fit(np.abs(ROWS)))
    assert isinstance(copy, DDNFDensity)
    assert copy.get_params() == model.get_params()
    assert not hasattr(copy, "density_")


def test_in_a_pipeline():
    pipeline = make_pipeline(StandardScaler(), tiny()).fit(ROWS)
    assert pipeline.score(ROWS) == np.sum(pipeline.score_samples(ROWS))


def test_in_a_search():
    search = GridSearchCV(tiny(), dict(random_state=[0, 1]), cv=2, error_score="raise").fit(ROWS)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.score(ROWS) == search.best_estimator_.score(ROWS)


@pytest.mark.slow
def test_default_flow_in_a_search_of_a_pipeline(tmp_path):
    pipeline = make_pipeline(StandardScaler(), DDNFDensity(steps=3, random_state=0))
    search = GridSearchCV(pipeline, dict(ddnfdensity__learning_rate=[1e-3, 1e-2]), cv=2, error_score="raise").fit(ROWS)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    joblib.dump(search, tmp_path / "search.joblib")
    assert_array_equal(joblib.load(tmp_path / "search.joblib").score_samples(ROWS), search.score_samples(ROWS))


@pytest.mark.slow
def test_autoregressive_splines_are_pickled():
    """The default of many columns: layers of FlowJAX, which hold functions that cannot be pickled."""
    rows = np.random.default_rng(1).normal(size=(40, 17))
    model = DDNFDensity(steps=3, random_state=0).fit(rows)
    copy = pickle.loads(pickle.dumps(model))
    assert_array_equal(copy.score_samples(rows), model.score_samples(rows))
    assert_array_equal(copy.sample(3, random_state=0), model.sample(3, random_state=0))


def test_names_of_columns():
    frame = pd.DataFrame(ROWS, columns=["width", "height"])
    model = tiny().fit(frame)
    assert list(model.feature_names_in_) == ["width", "height"]
    assert model.density_.names == ("width", "height")
    with pytest.raises(ValueError, match="feature names should match"):
        model.score_samples(frame[["height", "width"]])


def test_frames_of_draws():
    frame = pd.DataFrame(ROWS, columns=["width", "height"])
    named = tiny().fit(frame)
    assert isinstance(named.sample(3), np.ndarray)
    draws = named.set_output(transform="pandas").sample(3, random_state=0)
    assert list(draws.columns) == ["width", "height"]
    assert_array_equal(draws, named.set_output(transform="default").sample(3, random_state=0))
    with sklearn.config_context(transform_output="pandas"):
        assert list(tiny().fit(ROWS).sample(2).columns) == ["x0", "x1"]
    with pytest.raises(ValueError, match="Expected transform to be"):
        named.set_output(transform="excel")


def test_mixed_frames():
    frame = pd.DataFrame(ROWS, columns=["width", "height"]).assign(kind=["a", "b"] * 20)
    model = tiny().fit(frame)
    assert model.sample(4).dtypes.equals(frame.dtypes)
    scores = model.score_samples(frame)
    assert scores.shape == (40,) and model.n_features_in_ == 3
    for some in (slice(1), slice(None, None, 2)):  # of one level
        assert_allclose(model.score_samples(frame[some]), scores[some])
    frame.loc[3, "width"] = np.nan
    assert tiny(missing="drop").fit(frame).density_.dropped_rows == 1


def test_frames_with_dates():
    days = pd.Timestamp("2020-01-01") + pd.to_timedelta(np.arange(40), "D")
    frame = pd.DataFrame(ROWS[:, :1], columns=["width"]).assign(day=days)
    model = tiny().fit(frame)
    assert model.sample(4).dtypes.equals(frame.dtypes)
    assert np.isfinite(model.score_samples(frame)).all()


@pytest.mark.slow
def test_in_other_processes():
    scores = cross_val_score(tiny(), ROWS, cv=2, n_jobs=2, error_score="raise")
    # The other processes compute in single precision, and draw other numbers.
    assert_allclose(scores, cross_val_score(tiny(), ROWS, cv=2), rtol=0.05)


def test_dumped(model, tmp_path):
    joblib.dump(model, tmp_path / "model.joblib")
    assert_array_equal(joblib.load(tmp_path / "model.joblib").score_samples(ROWS), model.score_samples(ROWS))


def test_supports():
    model = tiny(support={0: "positive"}).fit(np.abs(ROWS))
    assert (model.sample(50, random_state=0)[:, 0] > 0).all()
    assert model.score_samples([[-1.0, 1.0]]) == -np.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(blocks=0), "Expected blocks to be an integer of at least 1"),
        (dict(activation="relu"), "Expected activation to be one of"),
        (dict(steps=0), "Expected steps to be an integer of at least 1"),
        (dict(hidden=16), "Expected hidden to be a sequence of widths"),
        (dict(learning_rate=0.0), "Expected a positive learning_rate"),
        (dict(validation=0.0), "Expected validation"),
        (dict(support="unit"), "Expected x in its support"),
        (dict(random_state="now"), "cannot be used to seed"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options).fit(ROWS)


def test_steps_are_training_steps():
    """As in `fit_density`; `iterations` is the old name."""
    assert len(tiny(steps=150).fit(ROWS).density_.losses) == 2
    with pytest.warns(FutureWarning, match="iterations=. is deprecated"):
        assert len(tiny(iterations=150).fit(ROWS).density_.losses) == 2


def test_too_few_rows():
    with pytest.raises(ValueError, match=r"Found array with 9 sample\(s\)"):
        tiny().fit(ROWS[:9])


def test_not_fitted():
    for method in (lambda model: model.score(ROWS), lambda model: model.sample()):
        with pytest.raises(NotFittedError):
            method(tiny())
