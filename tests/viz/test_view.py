"""The view of a flow: its frames are what the flow does, and `ddnf view` makes a page of a model."""

import base64
import json
import webbrowser
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import Chain, Invert, Tanh, TriangularAffine
from flowjax.distributions import StandardNormal, Transformed
from numpy.testing import assert_allclose, assert_array_equal

from ddnf import DDNF, Posterior, cli
from ddnf.viz.view import frames, page
from tests.cli.test_cli import density, one_line

END = TriangularAffine(jnp.array([40.0, -2.0]), jnp.array([[3.0, 0.0], [0.5, 0.2]]))
FLOWS = {
    "flow": lambda: DDNF(jr.key(1), 2, blocks=2, steps=4, hidden=(4,), output_scale=0.6),
    "with an affine end": lambda: Chain([FLOWS["flow"](), END]),
    "inverted, with an affine end": lambda: Chain([Invert(FLOWS["flow"]()), END]),
    "inverted chain": lambda: Invert(Chain([END, FLOWS["flow"]()])),
    "four dimensions": lambda: DDNF(jr.key(1), 4, blocks=2, steps=4, hidden=(4,), output_scale=0.6),
    "condition": lambda: DDNF(jr.key(1), 3, blocks=1, steps=2, hidden=(4,), output_scale=0.6, condition_dim=1),
    "line": lambda: DDNF(jr.key(1), 1, blocks=1, steps=2, hidden=(4,), output_scale=0.6),
}


def unpacked(packed, shape, low, high):
    """Points from what the page gets; NaN for none."""
    numbers = np.frombuffer(base64.b64decode(packed), "<u2").reshape(shape)
    shares = np.where(numbers > 0, numbers / 65535 * 2 - 0.5, np.nan)
    return low[:, None] + shares * (high - low)[:, None]


def boxes(shown):
    return np.moveaxis(np.array(shown["boxes"]), -1, 0)


def images(shown):
    """The density in each pixel, and the area of one."""
    held, (low, high) = shown["density"], boxes(shown)
    size = held["size"]
    roots = np.frombuffer(base64.b64decode(held["data"]), "u1").reshape(-1, size, size) / 255
    return roots**2 * np.array(held["peaks"])[:, None, None], (high - low).prod(axis=1) / size**2


@pytest.mark.parametrize("name", FLOWS)
def test_particles_go_the_way_of_the_flow(name):
    flow, key = FLOWS[name](), jr.key(5)
    condition = None if flow.cond_shape is None else [0.7]
    shown = frames(flow, condition, key=key, count=9, particles=50)
    dim, wide = flow.shape[0], max(2, flow.shape[0])
    low, high = boxes(shown)
    moved = unpacked(shown["particles"]["data"], (9, 50, wide), low, high)
    x = jr.normal(key, (50, wide))
    y = eqx.filter_jit(jax.vmap(lambda x: flow.transform(x, None if condition is None else jnp.array(condition))))
    # Those far outside of the box are kept at half a box from it.
    near = (np.abs(moved - (low + high)[:, None] / 2) < 0.99 * (high - low)[:, None]).all(axis=(0, 2))
    assert near.mean() > 0.9
    for frame, expected in ((0, x), (-1, np.concatenate([y(x[:, :dim]), x[:, dim:]], axis=1))):
        assert_allclose(moved[frame, near], expected[near], atol=1e-4 * (high - low)[frame].max())
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown


def test_frames_between_are_those_of_the_path():
    flow = FLOWS["flow"]()
    shown = frames(Chain([flow, END]), key=jr.key(5), count=11, particles=20)  # the affine end begins at 0.8
    assert [stage["end"] for stage in shown["stages"]] == [0.8, 1.0]
    low, high = boxes(shown)
    moved = unpacked(shown["particles"]["data"], (11, 20, 2), low, high)
    x = jr.normal(jr.key(5), (20, 2))
    end, path = jax.vmap(flow.path)(x)
    assert_allclose(moved[4], path.points[:, 1, 0], atol=1e-3)
    assert_allclose(moved[8], end, atol=1e-3)
    assert_allclose(moved[9], (end + jax.vmap(END.transform)(end)) / 2, atol=1e-2)


def test_grid_of_a_pair_is_its_plane():
    flow = FLOWS["four dimensions"]()
    shown = frames(flow, count=3, particles=30, dims=[3, 1], labels=list("abcd"))
    assert shown["labels"] == ["d", "b"] and list(shown["grids"]) == ["0,1"] and shown["density"] is None
    grid, (low, high) = shown["grids"]["0,1"], boxes(shown)
    moved = unpacked(grid["data"], (3, grid["lines"] * grid["points"], 2), low, high)
    inside = (np.abs(moved - (low + high)[:, None] / 2) < 0.9 * (high - low)[:, None]).all(axis=(0, 2))
    assert inside.mean() > 0.5
    starts = jnp.zeros((len(inside), 4)).at[:, jnp.array([3, 1])].set(moved[0])
    assert_allclose(moved[-1][inside], jax.vmap(flow.transform)(starts)[inside][:, [3, 1]], atol=1e-2)


def test_rows_of_the_data_lie_in_the_last_frame():
    flow = Chain([FLOWS["flow"](), END])
    rows = np.asarray(jax.jit(jax.vmap(flow.transform))(jr.normal(jr.key(0), (2500, 2))))
    shown = frames(flow, rows=rows, count=3, particles=20)
    low, high = boxes(shown)
    found = unpacked(shown["rows"]["data"], (1, shown["rows"]["count"], 2), low[-1:], high[-1:])[0]
    near = (np.abs(found - (low + high)[-1] / 2) < 0.99 * (high - low)[-1]).all(axis=1)
    assert shown["rows"]["count"] == 834 and near.mean() > 0.5
    assert_allclose(found[near], rows[::3][near], atol=1e-3)
    assert frames(flow, count=2, particles=2)["rows"] is None


@pytest.mark.parametrize("name", ["flow", "inverted, with an affine end", "line"])
def test_density_is_that_of_the_flow(name):
    """The exact one, averaged over each pixel and its neighbours with the weights of bilinear shares."""
    flow = FLOWS[name]()
    shown = frames(flow, count=3)
    found, area = images(shown)
    assert_allclose(found.sum(axis=(1, 2)) * area, 1, atol=0.01)
    low, high = boxes(shown)[:, -1]
    offsets = np.array([-0.75, -0.25, 0.25, 0.75])
    weights = (1 - np.abs(offsets)) / 2
    axes = [low[i] + (high - low)[i] / 64 * (np.arange(64)[:, None] + 0.5 + offsets).ravel() for i in (0, 1)]
    points = np.stack(np.meshgrid(*axes), axis=-1)
    exact = np.exp(Transformed(StandardNormal(flow.shape), flow).log_prob(points[..., : flow.shape[0]]))
    if name == "line":
        exact = exact * np.exp(-(points[..., 1] ** 2) / 2) / np.sqrt(2 * np.pi)
    expected = np.einsum("iajb,a,b->ij", exact.reshape(64, 4, 64, 4), weights, weights)
    assert np.abs(found[-1] - expected).max() < 0.04 * expected.max()


def test_a_flow_that_tears_leaves_no_gaps():
    """Where the map stretches a lot, mass is spread over all the pixels between, and lines get more points."""
    far = Chain([Tanh((2,)), TriangularAffine(jnp.zeros(2), jnp.diag(jnp.array([30.0, 1.0])))])
    shown = frames(Chain([TriangularAffine(jnp.zeros(2), 3 * jnp.eye(2)), far]), count=2)
    found, area = images(shown)
    row = found[-1].sum(axis=0)[26:38]
    assert_allclose(row / row.mean(), 1, atol=0.1)
    assert_allclose(found.sum(axis=(1, 2)) * area, 1, atol=0.01)
    grid, (low, high) = shown["grids"]["0,1"], boxes(shown)
    lines = unpacked(grid["data"], (2, grid["lines"] * grid["points"], 2), low, high)
    lines = (lines / (high - low)[:, None]).reshape(2, grid["lines"], grid["points"], 2)
    assert np.abs(np.diff(lines[-1], axis=1)).max() < 0.05  # even points along the line would be 0.1 apart


def test_boxes_stay_unless_the_particles_would_be_lost():
    still, _ = np.moveaxis(np.array(frames(FLOWS["flow"](), count=3)["boxes"]), -1, 0)
    assert (still == still[0]).all()
    low, high = boxes(frames(FLOWS["with an affine end"](), count=11))
    assert low[0, 0] < 0 < high[0, 0] and 20 < low[-1, 0] < 40 < high[-1, 0]


def test_points_without_numbers_are_left_out():
    flow = Invert(Tanh((2,)))  # its inverse is not defined beyond 1
    shown = frames(flow, key=jr.key(0), count=2, particles=40)
    low, high = boxes(shown)
    moved = unpacked(shown["particles"]["data"], (2, 40, 2), low, high)
    lost = (np.abs(np.asarray(jr.normal(jr.key(0), (40, 2)))) >= 1).any(axis=1)
    assert 0 < lost.sum() < 40
    assert_array_equal(np.isnan(moved[-1]).any(axis=1), lost)


def test_pages_are_small_and_hold_any_text():
    shown = frames(FLOWS["flow"](), labels=["</script><b>", "&"])
    text = page({"<i>one</i>": shown}, "a <title> & more")
    assert len(text) < 750_000
    assert "<i>" not in text and "<b>" not in text and text.count("a &lt;title&gt; &amp; more") == 2
    ten = frames(DDNF(jr.key(0), 10, blocks=1, steps=1, hidden=(2,)))
    assert len(ten["labels"]) == 6 and len(ten["grids"]) == 15
    assert len(page({"ten": ten}, "ten")) < 1_500_000
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("flow", "options", "message"),
    [
        ("flow", dict(condition=[1.0]), r"condition of shape None; got \(1,\)"),
        ("condition", dict(), r"condition of shape \(1,\); got None"),
        ("flow", dict(dims=[0, 0]), "different coordinates from 0 to 1"),
        ("flow", dict(dims=[0]), "two or more different coordinates"),
        ("four dimensions", dict(dims=[0, 4]), "from 0 to 3"),
        ("flow", dict(count=1), "Expected 2 frames"),
        ("flow", dict(labels=["a"]), "2 labels; got 33, 600, 1"),
    ],
)
def test_bad_input(flow, options, message):
    with pytest.raises(ValueError, match=message):
        frames(FLOWS[flow](), **options)


def test_no_flow_to_show():
    with pytest.raises(ValueError, match="at least one flow"):
        page({}, "none")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(webbrowser, "open", lambda uri: Path("opened").write_text(uri))
    density(["positive", (0, 1)], names=("price", "share")).save("named.ddnf")
    density(dim=3, condition_dim=2, names=("a", "b", "c", "year", "size")).save("given.ddnf")
    flow, course = FLOWS["with an affine end"](), np.zeros(1)
    Posterior(flow, None, 0.0, 0.0, 0.0, 0.0, 0.0, (), course, course).save("posterior.ddnf")
    return tmp_path


def test_view_command(folder, capsys, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    cli.main(["view", "named.ddnf"])
    assert Path("opened").read_text() == (folder / "named.html").as_uri()
    assert "named.html" in capsys.readouterr().out
    text = Path("named.html").read_text()
    assert "log price" in text and "logit share" in text
    cli.main(["view", "given.ddnf", "-o", "page.html", "--condition", "size=1,year=2", "--columns", "c,0"])
    assert '"labels":["c","a"]' in Path("page.html").read_text()


def test_view_shows_the_rows_of_a_table(folder):
    """Those in the support, found by their names."""
    Path("table.csv").write_text("share,price,more\n0.5,2.0,1\n0.25,1.0,1\n0.5,-1.0,1\n")
    cli.main(["view", "named.ddnf", "table.csv", "--no-open"])
    text = Path("named.html").read_text()
    assert '"rows":{"count":2' in text and "the rows of table.csv" in text and "Log-likelihood" in text


def test_view_command_without_a_display(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    cli.main(["view", "posterior.ddnf"])
    assert "posterior.html" in capsys.readouterr().out and Path("posterior.html").exists()
    monkeypatch.setenv("DISPLAY", ":0")
    cli.main(["view", "posterior.ddnf", "--no-open"])
    assert not Path("opened").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("view none.ddnf", "none.ddnf"),
        ("view named.ddnf -o nowhere/page.html", "Expected a file in an existing folder"),
        ("view named.ddnf -o named.ddnf", "Expected another file than the model"),
        ("view named.ddnf --condition 1", "Expected no numbers in --condition; got 1"),
        ("view given.ddnf", "Expected 2 numbers in --condition; got 0"),
        ("view given.ddnf --condition 1", "Expected 2 numbers in --condition; got 1"),
        ("view posterior.ddnf --condition 1", "Expected no condition for a posterior"),
        ("view posterior.ddnf table.csv", "a density without conditions only; got 'table.csv' for a posterior"),
        ("view given.ddnf table.csv --condition 1,2", "only for a density without conditions"),
        ("view named.ddnf --columns price,size", "(log price, logit share); got 'size'"),
        ("view named.ddnf --columns price", "two or more different coordinates"),
    ],
)
def test_bad_commands(folder, capsys, command, message):
    assert message in one_line(command.split(), capsys)
    assert not list(Path().glob("*.html"))
