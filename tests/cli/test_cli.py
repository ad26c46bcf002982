"""The `ddnf` command: a table goes in and comes out, and bad input is one line without a traceback."""

import dataclasses
import functools
import gzip
import subprocess
import sys
import warnings
from pathlib import Path

import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import Invert
from numpy.testing import assert_allclose, assert_array_equal

import ddnf
from ddnf import DDNF, Density, cli
from ddnf.cli.options import parse_condition
from ddnf.cli.view import _find_label
from ddnf.density.columns import columns_from
from ddnf.density.encode import encode_condition
from ddnf.density.lines import Format
from ddnf.density.schema import Field, Schema
from ddnf.density.tables import open_table

RNG = np.random.default_rng(0)
GIVEN = RNG.normal(size=60)
ROWS = np.stack([np.exp(GIVEN + RNG.normal(size=60)), RNG.normal(size=60), GIVEN], axis=1)


def density(support="real", dim=2, condition_dim=None, names=None):
    """A density that nobody has fitted."""
    flow = Invert(DDNF(jr.key(3), dim, blocks=1, steps=2, hidden=(4,), condition_dim=condition_dim))
    given = (None, None) if condition_dim is None else (np.zeros(condition_dim), np.ones(condition_dim))
    columns = columns_from(support, dim)
    return Density(
        flow, columns, np.zeros(dim), np.eye(dim), *given, 0.0, 0.0, np.zeros(1), np.zeros(1), np.zeros(1), names
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with tables and models, to work in."""
    monkeypatch.chdir(tmp_path)
    lines = [f"r{i},{a:.9g},{b:.9g},{c:.9g}" for i, (a, b, c) in enumerate(ROWS)]
    Path("named.csv").write_text("\n".join(["id,price,size,year", *lines]))
    np.savetxt("plain.csv", ROWS[:, :2], delimiter=",")
    np.save("plain.npy", ROWS[:, :2])
    density().save("plain.ddnf")
    density(["positive", "real"], names=("price", "size")).save("named.ddnf")
    density(condition_dim=1, names=("price", "size", "year")).save("given.ddnf")
    return tmp_path


def read(path):
    table = open_table(Path(path))
    return table.names, table.read(list(range(table.width)))


def load(path) -> Density:
    model = ddnf.load(path)
    assert isinstance(model, Density)
    return model


def test_fit_sample_and_score(folder, capsys):
    columns = ["--columns", "size,price", "--condition", "year", "--support", "price=positive"]
    cli.main(["fit", "named.csv", "-o", "model.ddnf", *columns, "--steps", "10", "--seed", "1"])
    shown = capsys.readouterr()
    for word in ("60", "size, price", "year", "on 6 held-out rows", " s\n", "model.ddnf"):
        assert word in shown.out
    assert "10/10" in shown.err
    model = load("model.ddnf")
    assert model.names == ("size", "price", "year") and model.columns[1].low == 0.0

    cli.main(["sample", "model.ddnf", "-n", "7", "-o", "draws.csv", "--condition", "0.5", "--seed", "3"])
    names, draws = read("draws.csv")
    assert names == ("size", "price")
    assert_array_equal(draws, model.sample(jr.key(3), 7, [0.5]))

    cli.main(["score", "model.ddnf", "named.csv", "-o", "scores.npy"])
    scores = model.log_prob(ROWS[:, [1, 0]], ROWS[:, 2:])
    assert_allclose(np.load("scores.npy")[:, 0], scores, atol=1e-6)
    assert f"mean log-likelihood of 60 rows: {np.mean(scores):.6g}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "columns", "condition", "support"),
    [
        (["--columns", "price,size"], ["price", "size"], [], None),
        (["--columns", "1,2"], ["price", "size"], [], None),
        (["--columns", "size", "--condition", "price,3"], ["size"], ["price", "year"], None),
        (["--columns", "size,price", "--support", "price=positive"], ["size", "price"], [], {1: "positive"}),
        (["--columns", "size,price", "--support", '{"1": "positive"}'], ["size", "price"], [], {1: "positive"}),
        (["--columns", "price,size", "--support", '{"size": [-9, null]}'], ["price", "size"], [], {1: (-9, None)}),
        (["--columns", "price,size", "--support", "size=-9:9.5"], ["price", "size"], [], {1: (-9.0, 9.5)}),
        (
            ["--columns", "price,size", "--support", '["positive", [-9, 9]]'],
            ["price", "size"],
            [],
            ["positive", (-9, 9)],
        ),
        (["--columns", "price", "--support", "positive"], ["price"], [], "positive"),
        (["--columns", "price", "--support", "0:"], ["price"], [], (0.0, None)),
    ],
)
def test_what_is_fitted(folder, monkeypatch, capsys, options, columns, condition, support):
    seen = {}

    def fit_density(key, x, condition, **rest):
        seen.update(rest, x=x, condition=condition)
        return density(dim=x.shape[1], condition_dim=None if condition is None else condition.shape[1])

    monkeypatch.setattr("ddnf.cli.fit.fit_density", fit_density)
    cli.main(["fit", "named.csv", "-o", "out.ddnf", *options, "--quiet", "--validation", "7"])
    places = ["price", "size", "year"]
    assert_allclose(seen["x"], ROWS[:, [places.index(name) for name in columns]], rtol=1e-8)
    assert (seen["condition"] is None) == (not condition)
    assert seen["support"] == support and not seen["progress"]
    assert (seen["validation"], type(seen["validation"])) == (7, int)
    assert seen["names"] == [*columns, *condition]
    assert capsys.readouterr().out == ""


def test_other_columns_than_conditions(folder, monkeypatch):
    def fit_density(key, x, condition, **_):
        return density(dim=x.shape[1], condition_dim=1)

    monkeypatch.setattr("ddnf.cli.fit.fit_density", fit_density)
    cli.main(["fit", "plain.csv", "-o", "out.ddnf", "--condition", "0"])
    model = load("out.ddnf")
    assert (model.dim, model.condition_dim, model.names) == (1, 1, None)


@pytest.mark.parametrize("ending", ["npy", "csv"])
def test_columns_without_names_are_found_again(folder, monkeypatch, capsys, ending):
    def fit_density(key, x, condition, *, names, **_):
        return density(condition_dim=1, names=tuple(names))

    monkeypatch.setattr("ddnf.cli.fit.fit_density", fit_density)
    np.save("all.npy", ROWS)
    np.savetxt("all.csv", ROWS, delimiter=",")
    cli.main(["fit", f"all.{ending}", "-o", "out.ddnf", "--columns", "2,0", "--condition", "1", "--quiet"])
    model = load("out.ddnf")
    assert model.names == ("column 2", "column 0", "column 1")
    cli.main(["score", "out.ddnf", f"all.{ending}", "-o", "scores.npy"])
    assert_allclose(np.load("scores.npy")[:, 0], model.log_prob(ROWS[:, [2, 0]], ROWS[:, 1:2]), rtol=1e-5)
    capsys.readouterr()
    assert "a column 'column 2' in 'plain.npy'; got column 0, column 1" in one_line(
        ["score", "out.ddnf", "plain.npy"], capsys
    )
    cli.main(["sample", "out.ddnf", "-n", "2", "--condition", "column 1=0.5"])
    assert capsys.readouterr().out.startswith("column 2,column 0\n")


def test_columns_to_view_by_name_or_number():
    labels = ["total price", "log price", "logit log", "column 3"]
    words = ["price", "log price", "log", "total price", "1", "column 3", "3"]
    assert [_find_label(word, labels) for word in words] == [1, 1, 2, 0, 1, 3, 3]
    with pytest.raises(ValueError, match="got 'total'"):
        _find_label("total", labels)


def test_warnings_are_one_line(folder, monkeypatch, capsys):
    def fit_density(*_, **__):
        warnings.warn("rows repeat\nothers", RuntimeWarning, stacklevel=1)
        return density()

    monkeypatch.setattr("ddnf.cli.fit.fit_density", fit_density)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        cli.main(["fit", "plain.npy", "-o", "out.ddnf", "--quiet"])
    assert capsys.readouterr().err == "ddnf: warning: rows repeat others\n"


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".npy", ".parquet", ".CSV"])
def test_formats_of_tables(folder, ending):
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    cli.main(["sample", "named.ddnf", "-n", "5", "-o", f"draws{ending}"])
    names, draws = read(f"draws{ending}")
    assert names == (None if ending == ".npy" else ("price", "size"))
    assert_array_equal(draws, load("named.ddnf").sample(jr.key(0), 5))
    cli.main(["score", "named.ddnf", f"draws{ending}", "-o", f"scores{ending}"])
    assert read(f"scores{ending}")[1].shape == (5, 1)


def test_no_names_no_header(folder, capsys):
    cli.main(["sample", "plain.ddnf", "-n", "4"])
    lines = capsys.readouterr().out.splitlines()
    draws = [[float(cell) for cell in line.split(",")] for line in lines]
    assert_array_equal(draws, load("plain.ddnf").sample(jr.key(0), 4))
    cli.main(["score", "plain.ddnf", "plain.csv"])
    assert "of 60 rows" in capsys.readouterr().out


def test_conditions_by_name(folder, capsys):
    cli.main(["sample", "given.ddnf", "-n", "2", "--condition", "year=-1.5"])
    by_name = capsys.readouterr().out
    cli.main(["sample", "given.ddnf", "-n", "2", "--condition", "-1.5"])
    assert by_name == capsys.readouterr().out
    assert by_name.startswith("price,size\n")


def test_rows_outside_of_the_support_are_counted(folder, capsys):
    Path("some.csv").write_text("size,price\n1,2\n1,-2\n")
    cli.main(["score", "named.ddnf", "some.csv"])
    assert capsys.readouterr().out == "mean log-likelihood of 2 rows: -inf (1 outside of the support)\n"


def test_scores_of_incomplete_tables(folder, capsys):
    Path("some.csv").write_text("size,price\n1,2\n,2\n1,3\n")
    cli.main(["score", "named.ddnf", "some.csv", "--drop-missing", "-o", "scores.csv"])
    assert "of 2 rows" in capsys.readouterr().out
    scores = open_table(Path("scores.csv")).read_columns([0], missing="keep")[0]
    assert_array_equal(np.isnan(scores), [False, True, False])
    Path("some.csv").write_text("size,price\n1,2\n,2\ninf,3\n")
    assert "infinity in row 3, column 'size'" in one_line(["score", "named.ddnf", "some.csv", "--drop-missing"], capsys)


@pytest.mark.parametrize(
    ("text", "names", "values"),
    [
        ("1,2\n3,4\n", None, [[1, 2], [3, 4]]),
        ("a,b\n1,2\n\n3,4\n\n", ("a", "b"), [[1, 2], [3, 4]]),
        ("\ufeffa;b\r\n1;2\r\n", ("a", "b"), [[1, 2]]),
        ('"a, b"\tc\n1e-3\t 2 \n', ("a, b", "c"), [[1e-3, 2]]),
        ("x\n1\n2", ("x",), [[1], [2]]),
        ("x,2020\n0,1\n", ("x", "2020"), [[0, 1]]),
        ("\n \na;b\n1;2\n", ("a", "b"), [[1, 2]]),
        ("sep=|\na,b|c\n1|2\n", ("a,b", "c"), [[1, 2]]),
    ],
)
def test_dialects(tmp_path, text, names, values):
    path = tmp_path / "table.csv"
    path.write_text(text, newline="", encoding="utf-8")
    table = open_table(path)
    assert table.names == names
    assert_array_equal(table.read(list(range(table.width))), values)


FIT = ["fit", "{}", "-o", "out.ddnf"]
SCORE = ["score", "named.ddnf", "{}"]
TABLES = {
    "empty.csv": (b"", "an empty file"),
    "header.csv": (b"price,size\n", "Expected rows of numbers in 'header.csv'; got none"),
    "words.csv": (b"price,size\n1,2\n1,two\n", "got 'two' in row 2, column 'size' of 'words.csv'"),
    "unnamed.csv": (b"1,2\n1,two\n", "got 'two' in row 2, column 1 of 'unnamed.csv'"),
    "missing.csv": (b"price,size\n1,2\n,2\n", "got a missing value, NaN or infinity in row 2, column 'price'"),
    "missing first.csv": (b",2\n1,2\n", "got a missing value, NaN or infinity in row 1, column 0"),
    "nan.csv": (b"price,size\n1,nan\n", "a missing value, NaN or infinity in row 1, column 'size'"),
    "short.csv": (b"price,size\n1,2\n3\n", "Expected 2 columns in each row; got 1 in row 2 of 'short.csv'"),
    "long.csv": (b"price,size\n1,2\n3,4,5\n", "Expected 2 columns in each row; got 3 in row 2"),
    "quote.csv": (b'price,size\n"a,1\nb,2\n', "Expected two quotes around a cell, or none, in 'quote.csv'"),
    "february.csv": (
        b"price,size\n2020-02-28,1\n2020-02-30,2\n",
        "Expected dates of the calendar; got one that is not",
    ),
    "twice.csv": (b"price,price\n1,2\n", "got 'price' twice"),
    "latin.csv": (b"price,gr\xf6sse\n1,2\n", "Expected text in UTF-8 in 'latin.csv'"),
    "empty.npy": (b"", "Expected an array of numbers in 'empty.npy'"),
    "damaged.npy": (b"\x93NUMPY\x01\x00", "Expected an array of numbers in 'damaged.npy'"),
    "text.npy": (b"price,size\n1,2\n", "Expected an array of numbers in 'text.npy'"),
    "damaged.parquet": (b"PAR1", "arquet"),
    "table.xls": (
        b"1,2\n",
        "Expected a file that ends in .csv, .tsv, .npy, .parquet, .xlsx, .csv.gz, .tsv.gz; got 'table.xls'",
    ),
    "table": (b"1,2\n", "Expected a file that ends in"),
}
COMMANDS = {
    "missing table": ("fit none.csv -o out.ddnf", "got 'none.csv', which does not exist"),
    "folder as table": ("fit folder.csv -o out.ddnf", "got 'folder.csv', which is not a file"),
    "cube": ("fit cube.npy -o out.ddnf", "got float64 of shape (2, 2, 2)"),
    "complex": ("fit complex.npy -o out.ddnf", "got complex128 of shape (20, 2)"),
    "objects": ("fit objects.npy -o out.ddnf", "Expected an array of numbers in 'objects.npy'"),
    "several": ("fit several.npy -o out.ddnf", "got several"),
    "NaN array": ("fit nan.npy -o out.ddnf", "a missing value, NaN or infinity in row 3, column 1"),
    "too few rows": ("fit few.npy -o out.ddnf", "Expected at least 10 rows; got 3"),
    "words": ("fit named.csv -o out.ddnf", "column 'id' has 60 in 60 rows: leave it out"),
    "decimal mark": (
        "fit named.csv -o out.ddnf --decimal XX",
        "Expected one mark for decimal, such as a comma; got 'XX'",
    ),
    "equal marks": ("fit named.csv -o out.ddnf --thousands .", "another mark for thousands than for decimals"),
    "unknown column": ("fit named.csv -o out.ddnf --columns price,sice", "(id, price, size, year); got 'sice'"),
    "unknown number": ("fit plain.npy -o out.ddnf --columns 2", "(numbers from 0 to 1); got '2'"),
    "column twice": ("fit named.csv -o out.ddnf --columns price,price", "none both in --columns and --condition"),
    "both": ("fit named.csv -o out.ddnf --columns price --condition price", "none both in --columns"),
    "no columns": ("fit plain.npy -o out.ddnf --condition 0,1", "Expected at least one column"),
    "unknown support": ("fit plain.npy -o out.ddnf --support odd", "got 'odd'"),
    "support's column": ("fit plain.npy -o out.ddnf --support 5=unit", "got '5'"),
    "support elsewhere": ("fit named.csv -o out.ddnf --columns size --support price=unit", "got 'price', which is not"),
    "broken JSON": ("fit plain.npy -o out.ddnf --support {", "Expected JSON for the support"),
    "interval": ("fit plain.npy -o out.ddnf --support 0=a:b", "Expected numbers as the ends of an interval; got 'a'"),
    "named fault": ("fit named.csv -o out.ddnf --columns year,size --support size=unit", "column 'size' has values"),
    "constant": ("fit constant.csv -o out.ddnf --columns b,a", "column 'a' has one value only"),
    "steps": ("fit plain.npy -o out.ddnf --steps 0", "Expected steps to be an integer of at least 1; got 0"),
    "seed": ("fit plain.npy -o out.ddnf --seed -1", "Expected a seed from 0"),
    "no folder": ("fit plain.npy -o nowhere/out.ddnf", "Expected a file in an existing folder"),
    "output is folder": ("fit plain.npy -o folder.csv", "Expected a file in an existing folder"),
    "draws' ending": ("sample plain.ddnf -o draws.txt", "Expected a file that ends in"),
    "draws' folder": ("sample plain.ddnf -o nowhere/draws.csv", "Expected a file in an existing folder"),
    "no draws": ("sample plain.ddnf -n 0", "Expected n to be an integer of at least 1; got 0"),
    "too many draws": ("sample plain.ddnf -n 1000000000000000", "Expected work that fits in memory; got"),
    "missing model": ("sample none.ddnf", "none.ddnf"),
    "damaged model": ("sample damaged.ddnf", "Expected a ddnf model file"),
    "table as model": ("score plain.csv plain.csv", "Expected a ddnf model file"),
    "no condition": ("sample given.ddnf", "Expected a condition of 1 numbers"),
    "needless condition": ("sample plain.ddnf --condition 1", "Expected no condition; got one"),
    "word as condition": ("sample given.ddnf --condition a", "Expected finite numbers to condition on; got 'a'"),
    "other condition": ("sample given.ddnf --condition size=1", "Expected a value for each condition (year)"),
    "many conditions": ("sample given.ddnf --condition 1,2", "Expected condition"),
    "missing column": ("score given.ddnf constant.csv", "Expected a column 'price' in 'constant.csv'; got a, b"),
    "number of columns": ("score given.ddnf plain.npy", "Expected 3 columns in 'plain.npy'; got 2"),
    "scores' ending": ("score plain.ddnf plain.npy -o scores.json", "Expected a file that ends in"),
}


def one_line(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    shown = capsys.readouterr()
    assert stop.value.code == 2
    assert shown.out == "" and shown.err.startswith("ddnf: ") and shown.err.count("\n") == 1
    return shown.err


@pytest.mark.parametrize("command", [FIT, SCORE], ids=["fit", "score"])
@pytest.mark.parametrize("name", TABLES)
def test_bad_tables(folder, capsys, name, command):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    content, message = TABLES[name]
    Path(name).write_bytes(content)
    assert message in one_line([word.format(name) for word in command], capsys)
    assert not Path("out.ddnf").exists()


@pytest.mark.parametrize("case", COMMANDS)
def test_bad_commands(folder, capsys, case):
    Path("folder.csv").mkdir()
    Path("damaged.ddnf").write_bytes(b"\0" * 50)
    Path("constant.csv").write_text("a,b\n" + "".join(f"1,{i}\n" for i in range(20)))
    arrays = dict(cube=np.ones((2, 2, 2)), complex=np.ones((20, 2)) * 1j, few=ROWS[:3], nan=ROWS.copy())
    arrays["nan"][2, 1] = np.nan
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    np.save("objects.npy", np.array([[1, "a"]], object), allow_pickle=True)
    with open("several.npy", "wb") as file:
        np.savez(file, a=ROWS, b=ROWS)
    command, message = COMMANDS[case]
    assert message in one_line(command.split(), capsys)


def test_other_models(folder, capsys):
    flow = DDNF(jr.key(0), 2, blocks=1, steps=1, hidden=(2,))
    ddnf.Posterior(flow, None, 0.0, 0.0, 0.0, 0.0, 0.0, (), np.zeros(1), np.zeros(1)).save("posterior.ddnf")
    assert "which holds a posterior" in one_line(["sample", "posterior.ddnf"], capsys)


def test_parquet_without_its_library(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    Path("table.parquet").write_bytes(b"PAR1")
    assert "Expected pyarrow to be installed" in one_line(["fit", "table.parquet", "-o", "out.ddnf"], capsys)
    assert "Expected pyarrow to be installed" in one_line(["sample", "plain.ddnf", "-o", "x.parquet"], capsys)


def test_words_in_parquet(folder, capsys):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"price": [1.0, None], "size": ["a", "b"]}), "table.parquet")
    assert "a missing value, NaN or infinity in row 2, column 'price'" in one_line(
        ["score", "named.ddnf", "table.parquet"], capsys
    )
    assert "row 2, column 'price'" in one_line([*FIT[:1], "table.parquet", "-o", "m", "--columns", "price"], capsys)


KIND = ["ei", "rößl", "rößl"]
CELLS = [
    f"{i};1.{i:03d},5;{KIND[i % 3]};2020-01-{1 + i % 28:02d};{str(i % 2 == 1).lower()};{i * i % 17}" for i in range(40)
]
MIXED = "\n".join(["# by hand", ";price;kind;day;ok;weight", *CELLS, "40;NA;ei;2020-01-01;true;3"])
MARKS = ["--decimal", ",", "--thousands", ".", "--comment", "#"]


NUMBERS = {
    ".": {"1e3": 1000.0, " 7 ": 7.0, "20_01": None, "1,234": None, "many": None},
    ".,": {"1,234": 1234.0, "-12,345,678.5": -12345678.5, "1,5": None, "1,2345": None, "1,234.5,000": None},
    ",.": {"1.234,5": 1234.5, "1.5": None, "1,5": 1.5, "1.234.5": None},
}


@pytest.mark.parametrize("marks", NUMBERS)
def test_numbers_with_marks(marks):
    form = Format(decimal=marks[0], thousands=marks[1:])
    assert {cell: form.number(cell) for cell in NUMBERS[marks]} == NUMBERS[marks]


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "xlsx"])
def test_what_people_have(folder, ending):
    """Latin-1, decimal commas, thousands, comments, an index column, missing cells; gz and Excel."""
    path, form = Path(f"mixed.{ending}"), Format(decimal=",", thousands=".", comment="#", encoding="latin-1")
    if ending == "xlsx":
        book = pytest.importorskip("openpyxl").Workbook()
        for line in MIXED.splitlines()[1:]:
            cells = [line.split(";")[0], line.split(";")[1].replace(".", ""), *line.split(";")[2:]]
            book.active.append([{"true": True, "false": False, "NA": None}.get(cell, cell) for cell in cells])
        book.save(path)
    else:
        path.write_bytes(gzip.compress(MIXED.encode("latin-1")) if ending == "csv.gz" else MIXED.encode("latin-1"))
    table = open_table(path, form)
    assert table.names == ("", "price", "kind", "day", "ok", "weight")
    price, kind, day, ok = table.read_columns([1, 2, 3, 4], missing="drop")
    assert_allclose(price, 1000.5 + np.arange(40))
    assert kind[:2].tolist() == ["ei", "rößl"] and ok[:2].tolist() == [False, True]
    assert day[1] == np.datetime64("2020-01-02")
    assert len(table.read_columns([1], missing="keep")[0]) == 41


@pytest.mark.slow
def test_mixed_tables(folder, capsys, monkeypatch):
    Path("mixed.csv").write_text(MIXED, encoding="latin-1")
    words = ["mixed.csv", *MARKS, "--encoding", "latin-1", "--drop-missing"]
    flow = Invert(DDNF(jr.key(3), 3, blocks=1, steps=1, hidden=(4,), condition_dim=4))
    small = functools.partial(ddnf.fit_density, flow=flow)
    monkeypatch.setattr("ddnf.cli.fit.fit_density", small)
    cli.main(["fit", *words, "-o", "mixed.ddnf", "--steps", "2", "--support", "weight=count"])
    assert "40, 1 dropped" in (out := capsys.readouterr().out) and "price, kind, day, ok, weight" in out
    cli.main(["sample", "mixed.ddnf", "-n", "5", "-o", "draws.csv"])
    names, kind = (table := open_table(Path("draws.csv"))).names, table.read_columns([1])[0]
    assert names == ("price", "kind", "day", "ok", "weight") and set(kind) <= {"ei", "rößl"}
    cli.main(["score", "mixed.ddnf", "draws.csv"])
    cli.main(["score", "mixed.ddnf", *words])
    out = capsys.readouterr().out
    assert "of 5 rows" in out and "of 40 rows" in out
    assert "Expected a .csv, .tsv or .parquet file" in one_line(["sample", "mixed.ddnf", "-o", "draws.npy"], capsys)


def test_categories_in_conditions(folder, capsys):
    model = density(condition_dim=3, names=("price", "size", "year", "kind"))
    fields = Field("price"), Field("size"), Field("year"), Field("kind", "category", "str", ("0", "b"))
    dataclasses.replace(model, schema=Schema(fields[:2], fields[2:], "columns")).save("kinds.ddnf")
    cli.main(["sample", "kinds.ddnf", "-n", "2", "--condition", "kind=b,year=1.5"])
    by_name = capsys.readouterr().out
    words = ["sample", "kinds.ddnf", "-o", "draws.npy", "-n", "1000000000000000", "--condition", "kind=b,year=1.5"]
    assert "table of mixed columns; got .npy" in one_line(words, capsys)  # before anything is drawn
    cli.main(["sample", "kinds.ddnf", "-n", "2", "--condition", "1.5,b"])
    assert by_name == capsys.readouterr().out and by_name.startswith("price,size\n")
    assert "(0, b); got another" in one_line(["sample", "kinds.ddnf", "--condition", "1.5,c"], capsys)
    for kinds in ("00", "0b", "b0"):  # whether a column holds text is known from the model
        Path("few.csv").write_text("\n".join(["price,size,year,kind", *(f"1,2,3,{kind}" for kind in kinds)]))
        cli.main(["score", "kinds.ddnf", "few.csv"])
        assert "of 2 rows" in (out := capsys.readouterr().out) and "outside" not in out


def test_dates_and_durations_in_conditions():
    day, took = Field("day", "day", "datetime64[us]"), Field("took", "duration", "timedelta64[us]")
    model = dataclasses.replace(density(condition_dim=2), schema=Schema((Field("x"), Field("y")), (day, took)))
    values = parse_condition("1970-01-03,1.5", model)
    assert_allclose(encode_condition(model.schema, values), [2.0, 1.5])
    with pytest.raises(ValueError, match="a date such as 2020-12-31 for 'day'; got 'May'"):
        parse_condition("May,1.5", model)


def test_show(folder, capsys):
    cli.main(["show", "named.ddnf", "named.csv", "--columns", "size,price"])
    assert Path("named.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == "picture         named.png\n"
    assert "a new file to write to; 'named.png' exists" in one_line(["show", "named.ddnf"], capsys)
    cli.main(["show", "given.ddnf", "--condition", "0.5", "-o", "given.svg"])
    assert "given.svg" in capsys.readouterr().out
    words = ["show", "given.ddnf", "named.csv", "--condition", "0.5", "-o", "rows.svg"]
    assert "only for a density without conditions" in one_line(words, capsys)
    assert ".png, .pdf or .svg" in one_line(["show", "named.ddnf", "-o", "named.gif"], capsys)


def test_version(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"ddnf {ddnf.__version__}\n"


OVERWRITING = {
    "fit plain.npy -o {} --steps 2 --quiet": "a ddnf model to replace; '{}' is neither. Use --force",
    "sample plain.ddnf -n 2 -o {}.csv": "a new file to write to; '{}.csv' exists. Use --force",
    "sample plain.ddnf -n 2 -o {}.npy": "a new file to write to; '{}.npy' exists. Use --force",
    "score plain.ddnf plain.npy -o {}.tsv": "a new file to write to; '{}.tsv' exists. Use --force",
    "view plain.ddnf -o {} --no-open": "a page made by ddnf to replace; '{}' is neither. Use --force",
}


@pytest.mark.parametrize("command", OVERWRITING)
def test_only_force_overwrites_other_files(folder, capsys, command):
    words, output = command.format("mine").split(), Path(command.format("mine").split("-o ")[1].split()[0])
    output.write_text("thesis")
    assert OVERWRITING[command].format("mine") in one_line(words, capsys)
    assert output.read_text() == "thesis"
    cli.main([*words, "--force"])
    capsys.readouterr()
    written = output.read_bytes()
    assert b"thesis" not in written
    if "neither" in OVERWRITING[command]:  # a file of ours can be told, and is replaced
        cli.main(words)
    else:
        one_line(words, capsys)
        assert output.read_bytes() == written


@pytest.mark.parametrize("words", [[], ["fly"], ["fit"], ["fit", "plain.npy"], ["sample", "plain.ddnf", "-n", "many"]])
def test_usage(folder, capsys, words):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "ddnf" in capsys.readouterr().err


def test_interruption(folder, capsys, monkeypatch):
    def fit_density(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ddnf.cli.fit.fit_density", fit_density)
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", "plain.npy", "-o", "out.ddnf"])
    assert stop.value.code == 130
    assert capsys.readouterr().err == "ddnf: interrupted\n"


def test_as_a_module(tmp_path):
    words = [sys.executable, "-m", "ddnf", "score", "none.ddnf", "none.csv"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ddnf: ") and "none.ddnf" in done.stderr and done.stderr.count("\n") == 1


def test_bench_runs_make_in_the_checkout(folder, monkeypatch):
    Path("benchmarks").mkdir()
    Path("src/ddnf").mkdir(parents=True)
    Path("benchmarks/__main__.py").touch()
    seen = []
    monkeypatch.setattr(
        subprocess, "run", lambda words, **_: seen.append(words) or subprocess.CompletedProcess(words, 0)
    )
    cli.main(["bench", "--quick", "--only", "steps", "growth"])
    assert seen == [["make", "-C", str(Path.cwd()), "bench", "QUICK=1", "ONLY=steps growth"]]


def test_bench_needs_a_checkout(folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "--folder", "nowhere"])
    assert "Expected a source checkout" in capsys.readouterr().err
