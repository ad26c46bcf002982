"""Tables of mixed columns: frames in and out, categories, dates, missing values, files."""

import dataclasses
import datetime
import itertools
import re
from decimal import Decimal
from functools import cache

import dateutil.tz
import jax.random as jr
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ddnf
from ddnf import Density, fit_density
from ddnf.density import default_flow
from ddnf.density.categories import fit_categories
from ddnf.density.frames import build_table, is_dtype, read_columns
from ddnf.density.prepare import prepare
from ddnf.density.schema import Field, Schema, encode, field_of
from ddnf.density.tables import open_table

polars, pyarrow = pytest.importorskip("polars"), pytest.importorskip("pyarrow")
RNG = np.random.default_rng(0)
N = 120


@cache
def frame():
    kind = RNG.choice(["a", "b", "c"], N, p=[0.5, 0.3, 0.2])
    return pd.DataFrame(
        {
            "price": (1 + (kind == "a")) * RNG.gamma(2.0, size=N).astype("float32"),
            "kind": kind,
            "count": RNG.poisson(4.0, N).astype("int32"),
            "ok": RNG.random(N) < 0.3,
            "day": pd.Timestamp("2020-01-01") + pd.to_timedelta(RNG.integers(0, 300, N), "D"),
            "at": pd.Timestamp("2021-05-05", tz="Europe/Paris") + pd.to_timedelta(RNG.normal(size=N), "h"),
            "took": pd.to_timedelta(RNG.gamma(2.0, size=N), "s"),
            "grade": pd.Categorical(RNG.choice(["lo", "hi"], N), ["lo", "mid", "hi"], ordered=True),
        }
    )


def fit(x, condition=None, **options) -> Density:
    table = prepare(x, condition, missing="drop")
    given = None if table.given is None else table.given.shape[1]
    flow = default_flow(jr.key(1), table.rows.shape[1], given, blocks=1, steps=1, hidden=(4,))
    return fit_density(
        jr.key(0), x, condition, **dict(flow=flow, adaptive=True, components=1, steps=2, progress=False) | options
    )


@cache
def fitted():
    return fit(frame(), support={"price": "positive"})


@cache
def conditional():
    return fit(frame()[["price", "count", "kind", "ok"]], ["kind", "ok"], support={"price": "positive"})


def test_frames_come_out_as_they_went_in():
    draws = fitted().sample(jr.key(0), 20)
    assert draws.dtypes.equals(frame().dtypes)
    assert (draws["price"] > 0).all() and (draws["day"] == draws["day"].dt.normalize()).all()
    assert set(draws["grade"]) <= {"lo", "hi"}  # "mid" never occurred
    assert np.isfinite(fitted().log_prob(draws)).all()
    assert fitted().names == tuple(frame().columns) and fitted().dim == 8
    assert "kind: 3 levels" in str(fitted()) and "count: integers" in str(fitted())


@pytest.mark.slow
def test_polars_frames_come_out_as_they_went_in():
    table = polars.from_pandas(frame()).with_columns(
        polars.col("day").cast(polars.Date),
        polars.col("grade").cast(polars.Enum(["lo", "mid", "hi"])),
        kind=polars.col("kind").cast(polars.Categorical),
    )
    density = fit(table, support={"price": "positive"})
    draws = density.sample(jr.key(0), 20)
    assert isinstance(draws, polars.DataFrame) and draws.schema == table.schema
    assert_allclose(density.log_prob(table), fitted().log_prob(frame()), rtol=1e-9)


def test_columns_are_found_by_name():
    expected = fitted().log_prob(frame())
    assert_allclose(fitted().log_prob(frame()[frame().columns[::-1]].assign(more=1)), expected, rtol=1e-9)
    row = {name: frame()[name].iloc[0] for name in frame()}
    assert_allclose(fitted().log_prob(row), expected[:1], rtol=1e-9)
    with pytest.raises(ValueError, match="Expected a column 'kind'"):
        fitted().log_prob(frame().drop(columns="kind"))


MINUTES = np.datetime64("2020-01-01T00:00", "m") + np.arange(40) * 100
NAIVE = pd.Series(MINUTES).astype("datetime64[us]")
ARROW_TIME = pd.ArrowDtype(pyarrow.timestamp("us", "Europe/Paris"))
FOREIGN = {
    "integers of Arrow": (pd.Series(range(40), dtype="int64[pyarrow]"), "int64"),
    "text of Arrow": (pd.Series(["u", "v"] * 20, dtype=pd.ArrowDtype(pyarrow.string())), "str|object"),
    "times of Arrow": (NAIVE.dt.tz_localize("Europe/Paris").astype(ARROW_TIME), "datetime64.us, Europe/Paris."),
    "days of Arrow": (pd.Series([*NAIVE.dt.date[:39], None], dtype=pd.ArrowDtype(pyarrow.date32())), "datetime64.*"),
    "big-endian": (pd.Series(np.arange(40.0).astype(">f8")), "float64"),
    "sparse": (pd.Series(pd.arrays.SparseArray([0, 0, 1, 2] * 10)), "int64"),
    "dateutil": (NAIVE.dt.tz_localize(dateutil.tz.gettz("Europe/Paris")), "datetime64.us, UTC."),
    "minutes": (MINUTES, "datetime64.us."),
    "long": (np.arange(40, dtype=np.longdouble), "float64"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_other_types_come_out_as_those_of_numpy(case):
    column, dtype = FOREIGN[case]
    table = {"x": column} if isinstance(column, np.ndarray) else pd.DataFrame({"x": column})
    raw = read_columns(table)["x"]
    field = field_of("x", raw)
    values = encode(field, raw.values)
    assert is_dtype(field.dtype) and np.isnan(values).sum() == pd.isna(column).sum()
    schema = Schema((field,), library="columns" if isinstance(table, dict) else "pandas")
    drawn = build_table(schema, values[:5, None], [case in ("integers of Arrow", "sparse")])["x"]
    assert re.fullmatch(dtype, str(drawn.dtype))
    again = read_columns({"x": drawn} if isinstance(table, dict) else pd.DataFrame({"x": drawn}))["x"]
    assert_array_equal(encode(field, again.values), values[:5])


@pytest.mark.slow
def test_dicts_of_columns():
    density = fit({"size": RNG.normal(size=40), "kind": ["x", "y"] * 20})
    draws = density.sample(jr.key(0), 5)
    assert list(draws) == ["size", "kind"] and set(draws["kind"]) <= {"x", "y"}
    assert_allclose(
        density.log_prob([[0.1, "x"], [0.2, "y"]]), density.log_prob({"size": [0.1, 0.2], "kind": ["x", "y"]})
    )
    assert density.log_prob({"size": 0.1, "kind": "z"}) == -np.inf


def test_probabilities_of_categories_and_numbers_sum_to_one():
    density = fit({"size": RNG.normal(size=60) + [0.0, 2.0] * 30, "kind": ["x", "y"] * 30})
    size = np.linspace(-12.0, 14.0, 2001)
    parts = [np.trapezoid(np.exp(density.log_prob({"size": size, "kind": [kind] * 2001})), size) for kind in "xy"]
    assert_allclose(sum(parts), 1.0, atol=1e-3)


@pytest.mark.slow
def test_categories_are_drawn_as_often_as_they_are_probable():
    codes = RNG.choice(3, (200, 2), p=[0.6, 0.3, 0.1])
    codes[:, 1] = np.where(codes[:, 0] == 2, 0, codes[:, 1])
    model = fit_categories(codes, (3, 3))
    every = np.array(list(itertools.product(range(3), repeat=2)))
    probability = np.exp(model.log_prob(every))
    assert_allclose(probability.sum(), 1.0)
    draws = model.sample(np.random.default_rng(0), 20_000)
    found = (draws[:, None] == every).all(axis=2).mean(axis=0)
    assert_allclose(found, probability, atol=0.015)
    given = model.sample(np.random.default_rng(0), 20_000, known={0: 1})
    share = probability[every[:, 0] == 1] / probability[every[:, 0] == 1].sum()
    assert (given[:, 0] == 1).all()
    assert_allclose(np.bincount(given[:, 1], minlength=3) / 20_000, share, atol=0.015)


@pytest.mark.slow
def test_a_level_of_one_row_is_trained_on():
    """Held out, it would be impossible, and the likelihood of the held-out rows would be infinite."""
    held = np.random.default_rng(np.asarray(jr.key_data(jr.key(0)))).permutation(60)[3]
    kinds = np.where(np.arange(60) == held, "rare", "often")
    density = fit({"size": RNG.normal(size=60), "kind": kinds})
    assert np.isfinite(density.log_likelihood) and not density.issues
    assert np.isfinite(density.log_prob({"size": [0.0], "kind": ["rare"]})).all()


def test_categories_as_conditions():
    density = conditional()
    assert (density.dim, density.condition_dim) == (2, 2)
    draws = density.sample(jr.key(0), 5, {"kind": "a", "ok": True})
    assert list(draws) == ["price", "count"] and len(draws) == 5
    assert_array_equal(draws, density.sample(jr.key(0), 5, ["a", True]))
    assert len(density.sample(jr.key(0), condition=frame())) == N
    assert len(density.sample(jr.key(0), condition=["a", True])) == 1000
    x, given = frame()[["price", "count"]].to_numpy(float), frame()[["kind", "ok"]].to_numpy(object)
    stacked = density.log_prob(x.reshape(2, -1, 2), given.reshape(2, -1, 2))
    assert stacked.shape == (2, N // 2)
    assert_allclose(stacked.ravel(), density.log_prob(frame()), rtol=1e-9)
    expected = density.log_prob(frame()[["price", "count"]], frame()[["kind", "ok"]])
    assert_allclose(density.log_prob(frame()), expected, rtol=1e-9)
    with pytest.raises(ValueError, match=r"Expected levels of 'kind' that were seen \(a, b, c\)"):
        density.sample(jr.key(0), 5, {"kind": "d", "ok": True})


@pytest.mark.parametrize("make", [fitted, conditional], ids=["modelled", "given"])
def test_saved_and_loaded(make, tmp_path):
    density = make()
    density.save(tmp_path / "model.ddnf")
    loaded = ddnf.load(tmp_path / "model.ddnf")
    assert isinstance(loaded, Density) and loaded.schema == density.schema
    given = None if density.condition_dim is None else {"kind": "a", "ok": False}
    pd.testing.assert_frame_equal(loaded.sample(jr.key(0), 5, given), density.sample(jr.key(0), 5, given))
    assert_array_equal(loaded.log_prob(frame()), density.log_prob(frame()))


CRAFTED = {
    "type": (dict(dtype="__import__('os')"), "a column with a name, kind and type"),
    "kind": (dict(kind="code"), "a column with a name, kind and type"),
    "levels": (dict(levels=("a", "a", "b")), "levels that differ"),
    "fewer levels": (dict(levels=("a", "b")), "20 conditions|conditions; got|level numbers"),
    "objects": (dict(levels=("a", None, "c")), "levels that differ"),
    "name": (dict(name="price"), "a name for each column"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_files_are_refused(case, tmp_path, monkeypatch):
    change, message = CRAFTED[case]
    schema = fitted().schema
    assert schema is not None
    fields = list(schema.fields)
    fields[1] = fields[1]._replace(**change)
    crafted = dataclasses.replace(fitted(), schema=schema._replace(fields=tuple(fields)))
    if case in ("type", "kind", "levels", "objects"):  # what could not be loaded is not saved
        with pytest.raises(ValueError, match=message):
            crafted.save(tmp_path / "model.ddnf")
    with monkeypatch.context() as patch:
        patch.setattr("ddnf.storage.schema._field", tuple)
        crafted.save(tmp_path / "model.ddnf")
    with pytest.raises(ValueError, match=message):
        ddnf.load(tmp_path / "model.ddnf")


@pytest.mark.parametrize(
    "change", [dict(strength=-1.0), dict(counts=np.array([-1]), combinations=np.zeros((1, 3), int))]
)
def test_crafted_counts_are_refused(change, tmp_path):
    categories = fitted().categories
    assert categories is not None
    dataclasses.replace(fitted(), categories=categories._replace(**change)).save(tmp_path / "model.ddnf")
    with pytest.raises(ValueError, match="Expected"):
        ddnf.load(tmp_path / "model.ddnf")


def test_missing_values_are_named_or_dropped():
    table = frame().copy()
    table.loc[[3, 5], "price"] = np.nan
    table.loc[7, "kind"] = None
    with pytest.raises(ValueError, match=r"columns 'price' \(2\), 'kind' \(1\). Pass missing='drop'"):
        prepare(table, None)
    prepared = prepare(table, None, missing="drop")
    assert prepared.dropped == 3 and len(prepared.rows) == N - 3
    rows = np.where(RNG.random((50, 2)) < 0.1, np.nan, RNG.normal(size=(50, 2)))
    count, density = np.isnan(rows).any(axis=1).sum(), fit(rows, missing="drop")
    assert density.dropped_rows == count and density.train_rows + density.held_out_rows == 50 - count
    assert f"{count} more dropped" in str(density)


BAD = {
    "ids": ({"x": np.arange(300.0), "id": [f"r{i}" for i in range(300)]}, "column 'id' has 300: leave it out"),
    "one level": ({"x": np.arange(30.0), "k": ["a"] * 30}, "column 'k' has one value only"),
    "no numbers": ({"k": ["a", "b"] * 20}, "at least one column of numbers"),
    "lists": ({"x": np.arange(20.0), "k": [(1, 2), (3, 4)] * 10}, "one value in each cell"),
    "lengths": ({"x": np.arange(20.0), "k": ["a", "b"]}, "columns of one length"),
    "one value": ({"x": 1.0, "y": 2.0}, "a list of values in column 'x'"),
    "lists of polars": (
        polars.DataFrame({"x": [1.0, 2.0] * 10, "k": [[1, 2]] * 20}),
        r"got List\(Int64\) in column 'k'",
    ),
    "no columns": (pd.DataFrame(index=range(20)), "at least one column to model"),
    "text": ({"x": [f"{i}.5" for i in range(300)]}, "has 300: they are numbers as text"),
    "infinity": ({"x": [np.inf] + [1.0, 2.0] * 10}, "infinity in column 'x'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tables(case):
    table, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        prepare(table, None)


def test_decimals_are_numbers():
    values = [Decimal(f"{i}.25") for i in range(20)]
    assert_allclose(prepare({"x": values}, None).rows[:, 0], 0.25 + np.arange(20))


def test_bad_arguments():
    table = {"x": np.arange(20.0), "k": ["a", "b"] * 10}
    with pytest.raises(ValueError, match="Expected missing to be 'raise' or 'drop'"):
        prepare(table, None, missing="fill")
    with pytest.raises(ValueError, match="got 'k', a category"):
        prepare(table, None, support={"k": "count"})
    with pytest.raises(ValueError, match="the table has names of its own"):
        prepare(table, None, names=["a", "b"])
    with pytest.raises(ValueError, match="Expected 2 names"):
        prepare(np.ones((20, 2)), {"c": np.arange(20.0)}, names=["a", "b", "c"])
    with pytest.raises(ValueError, match="got the category 'k'"):
        prepare(table | {"y": np.arange(20.0)}, ["y"])
    with pytest.raises(ValueError, match="got 'z'"):
        prepare(table, "z")
    with pytest.raises(ValueError, match=r"Expected x in its support; column 'x' has values outside of \(0.0, inf\)"):
        prepare(table, None, support={"x": "positive"})


@pytest.mark.slow
def test_many_columns(tmp_path):
    """The default flow is autoregressive there: it is saved, loaded and inverted like any other."""
    rows = RNG.normal(size=(60, 18)).cumsum(axis=1)
    density = fit_density(jr.key(0), rows, steps=5, components=1, progress=False)
    density.save(tmp_path / "model.ddnf")
    loaded = ddnf.load(tmp_path / "model.ddnf")
    assert isinstance(loaded, Density)
    assert_array_equal(loaded.log_prob(rows), density.log_prob(rows))
    draws = loaded.sample(jr.key(0), 3)
    assert draws.shape == (3, 18) and np.isfinite(loaded.log_prob(draws)).all()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a;b\n1,5;2\n2,25;3\n", "--decimal"),
        ('a,b\n"1,234",2\n"12,000.5",3\n', "--thousands"),
        ("a,b\n10%,2\n3.5 %,3\n", "percentages"),
        ("a,b\n€1.5,2\n$3,3\n", "currency"),
        ("a,b\n31.12.2020,2\n1/2/21,3\n", "2020-12-31"),
        ('a,b\n"1,234",2\n"12,000",3\n', "--decimal , .*--thousands"),
        ('a,b\n999,2\n"1,234",3\n', "--thousands"),
        ("a,b\n7,2\n3.5 %,3\n", "percentages"),
        ("a|b\n1,5|2\n2,5|3\n", "--decimal"),
    ],
)
def test_numbers_in_another_notation_are_no_categories(tmp_path, text, hint):
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"column 'a'.*{hint}"):
        open_table(path).read_columns([0, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,5;2,5\n3,5;4,5\n", "column '1,5'.*--decimal"),
        ("red,1.5\nblue,2\nred,3\n", "looks like a row"),
        ("2020-01-01,0.942\n2020-01-02,2\n", "looks like a row"),
        ("true,5.1\nfalse,2\n,3\n", "looks like a row"),
        ("red,?\nred,2\n", None),  # a name may occur below
        ("5,?\n6,2\n", None),
    ],
)
def test_files_without_a_header_are_not_misread(tmp_path, text, message):
    path = tmp_path / "a.csv"
    path.write_text(text)
    if message is None:
        rows = open_table(path).read_columns([0, 1], missing="keep")
        assert len(rows[0]) == len(text.splitlines()) - (text[0] == "r")
        return
    with pytest.raises(ValueError, match=message):
        open_table(path).read_columns([0, 1])


@pytest.mark.parametrize(
    ("cells", "levels"),
    [
        ("0 0", ("0", "a", "b")),
        ("a 0", ("0", "a", "b")),
        ("true false", ("false", "maybe", "true")),
        ("TRUE false", (False, True)),
        ("1 2", (1, 2, 3)),
        ("none x", ("none", "x")),
        ("2020-01-01 2020-01-02", ("2020-01-01", "2020-01-02", "late")),
        ("1,5 2", ("1,5", "2", "x")),
    ],
)
def test_cells_are_read_as_the_levels_of_a_model(tmp_path, cells, levels):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["k;x", *(f"{cell};1" for cell in cells.split())]))
    found = open_table(path).read_columns([0], fields=[Field("k", "category", "str", levels)])[0].tolist()
    assert set(found) <= set(levels) and [str(level).lower() for level in found] == cells.lower().split()


def test_comments_without_the_option(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("# made today\na,b\n1,2\n")
    with pytest.raises(ValueError, match="--comment"):
        open_table(path).read_columns([0])


def test_times_in_utc(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("t\n2020-12-31T10:00:00Z\n2021-01-01T11:30:00Z\n")
    assert open_table(path).read_columns([0])[0].tolist()[1] == datetime.datetime(2021, 1, 1, 11, 30)
