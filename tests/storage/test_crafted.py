"""Model files with a valid checksum whose content does not fit together: refused quickly, with little memory."""

import copy
import json
import random
import resource
import time
import tracemalloc

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax import bijections as fj

import ddnf
from ddnf import flows
from ddnf.storage.description import MAX_PARTS
from ddnf.storage.file import read, write
from tests.cli.test_cli import density

HUGE = 10**9
NAN = float("nan")


def posterior(flow):
    return ddnf.Posterior(flow, None, 0.0, 0.0, 0.0, 0.0, 0.0, (), np.zeros(1), np.zeros(1))


def small_flow():
    return ddnf.DDNF(jr.key(0), 3, blocks=1, hidden=(4, 2))


MODELS = {
    "density": lambda: density(["positive", (0, 1)], names=("a", "b")),
    "conditional density": lambda: density(condition_dim=2, names=("a", "b", "c", "d")),
    "posterior": lambda: posterior(
        fj.Chain([ddnf.DDNF(jr.key(0), 3, blocks=1, hidden=(4, 2)), fj.Affine(jnp.ones(3))])
    ),
    "masked": lambda: posterior(flows.make("spline-iaf", jr.key(0), 2, layers=2, size=4)),
    "block": lambda: posterior(flows.make("bnaf", jr.key(0), 2, layers=2, size=2)),
    "ode": lambda: posterior(flows.make("cnf", jr.key(0), 2, layers=2, size=4)),
}


def nested(depth):
    description = {"type": "Exp", "shape": [2]}
    for _ in range(depth):
        description = {"type": "Invert", "bijection": description}
    return description


def values_for(key, old):
    """Settings that do not fit the arrays or the other settings, whatever the setting."""
    if key == "type":
        return ["Exp", "CNF", "MaskedAutoregressive", "os.system", None, "Exact", [], "Scan"]
    if key == "hidden":
        return [[1] * 10_000, [HUGE] * 3, [0], [-1], [*old, 1], [], "x", [True], [1.5]]
    if isinstance(old, bool):
        return [not old, 1, "yes", None]
    if isinstance(old, int):
        return [old + 1, 0, -1, HUGE, 10**30, old + 0.5, True, "3", [old]]
    if isinstance(old, float):
        return [NAN, float("inf"), "x", None, [old]]
    if isinstance(old, str):
        return ["", "x", 3, None, ["x"], "__import__('os')"]
    if isinstance(old, dict):
        return [None, {}, [], nested(300), nested(MAX_PARTS), {"type": "Exp", "shape": [HUGE]}, {**old, "more": 1}]
    if isinstance(old, list) and old and isinstance(old[0], dict):
        return [[], old[:-1] + [old[-1], old[-1]] * 3_000, [None], {}, [{"type": "Exp", "shape": [1]}]]
    return [[], [1], "x", {}, HUGE]


def places(node):
    for key in node if isinstance(node, dict) else range(len(node)):
        if key in FREE:
            continue
        yield node, key
        if isinstance(node[key], dict | list):
            yield from places(node[key])


# Settings that no array depends on: another value is another model, which the file might hold as well.
FREE = {"steps", "log_det", "solver", "inverse", "lipschitz", "recompute", "activation", "frozen", "interval"}
FREE |= {"rtol", "atol", "max_steps", "min_derivative", "min_width", "axis", "lower", "probes", "kind", "order", "key"}


def change_description(rng, header, arrays):
    node, key = rng.choice([*places(header["flow"])])
    old = copy.deepcopy(node[key])
    node[key] = rng.choice([value for value in values_for(key, old) if value != old])


def change_header(rng, header, arrays):
    changes = [
        lambda: header.pop("figures"),
        lambda: header.pop("flow"),
        lambda: header.update(flow=None),
        lambda: header.update(figures=[]),
        lambda: header["figures"].update({rng.choice(sorted(header["figures"])): rng.choice(["x", [], {}])}),
        lambda: header.update(issues=[1, 2]),
        lambda: header.update(issues=7),
    ]
    if "sites" in header:
        shape = rng.choice([[HUGE], [-1], [1], ["x"], 3, [[2]]])
        changes += [lambda: header.update(sites=[["a", shape, "exp", {}]]), lambda: header.update(sites=[[]], log=[[]])]
        changes += [lambda: header.update(sites=[["a", [2], "softmax", 3]]), lambda: header.update(log=[["a", "b"]])]
    if "columns" in header:
        columns = header["columns"]
        changes += [
            lambda: columns.pop(),
            lambda: columns.extend([[None, None, False]] * rng.choice([1, 100_000])),
            lambda: columns.__setitem__(0, rng.choice([[1, 0, False], [NAN, None, False], ["a", None, False], [0], 3])),
            lambda: columns.__setitem__(0, [0, 1, 2, 3]),
            lambda: columns.__setitem__(0, [0.0, 1.0, "yes"]),
            lambda: header["names"].pop(),
            lambda: header["names"].append("z"),
            lambda: header.update(names=[1] * len(header["names"])),
            lambda: header.update(names=7),
        ]
    rng.choice(changes)()


def change_arrays(rng, header, arrays):
    name = rng.choice(sorted(arrays))
    array = np.array(arrays[name])
    changes = [lambda: arrays.pop(name), lambda: arrays.update({name: array[None]})]
    if name not in ("losses", "values", "seconds"):
        changes.append(lambda: arrays.update({name: np.array(["1", "0"][rng.randrange(2)] == "1")}))
        if array.dtype.kind == "f":
            bad = rng.choice([NAN, float("inf"), -float("inf")])
            changes += [lambda: arrays.update({name: np.full_like(array, bad)})] * 2
    if name in ("losses", "seconds"):
        changes = changes[1:]  # older files have no seconds
    if name in ("scale", "condition_scale"):
        changes += [lambda: arrays.update({name: -array}), lambda: arrays.update({name: 0 * array})]
    if name == "scale":
        changes += [lambda: arrays.update({name: array + np.eye(len(array), k=1)})]
    arrays.setdefault("flow.more", np.zeros(1)) if rng.random() < 0.1 else rng.choice(changes)()


CRAFTED = [change_description, change_description, change_header, change_arrays]


def crafted(folder, count):
    """Paths of crafted files, one after another."""
    for name, make in MODELS.items():
        make().save(folder / f"{name}.ddnf")
    rng = random.Random(0)
    for number in range(count):
        kind, header, arrays = read(folder / f"{[*MODELS][number % len(MODELS)]}.ddnf")
        change = CRAFTED[(number // len(MODELS)) % len(CRAFTED)]
        change(rng, header, arrays)
        if rng.random() < 0.02:
            kind = "other"
        path = folder / "crafted.ddnf"
        write(path, kind, header, arrays, overwrite=True)
        yield path, json.dumps(header)[:300]


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_crafted_files_are_refused(tmp_path, count):
    for path, shown in crafted(tmp_path, count):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        with pytest.raises(ValueError, match="Expected") as raised:
            raise AssertionError(f"loaded {ddnf.load(path)!r:.80} from {shown}")
        assert time.process_time() - start < 5, shown
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, shown
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


def test_large_header_takes_little_memory(tmp_path):
    path = tmp_path / "a.ddnf"
    write(path, "density", dict(flow=None, reason="", more=[[]] * 1_200_000), {})
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="In "):
            ddnf.load(path)
        assert tracemalloc.get_traced_memory()[1] < 500e6
    finally:
        tracemalloc.stop()
    with pytest.raises(ValueError, match="Expected a header of at most"):
        write(path, "density", dict(more=[[]] * 2_000_000), {})


def test_a_flow_with_nan_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="finite parameters"):
        posterior(fj.Affine(jnp.array([0.0, NAN]))).save(tmp_path / "a.ddnf")
    assert not list(tmp_path.iterdir())


def test_too_many_parts_need_like(tmp_path):
    flow = fj.Chain([fj.Exp((2,)), fj.Invert(fj.Exp((2,)))] * MAX_PARTS)
    posterior(flow).save(tmp_path / "a.ddnf")
    with pytest.raises(ValueError, match="like="):
        ddnf.load(tmp_path / "a.ddnf")
    assert ddnf.load(tmp_path / "a.ddnf", like=flow).flow.shape == (2,)
