"""Model files: what is saved comes back bit for bit, and a damaged or foreign file is one clear error."""

import json
import struct
import time
import tracemalloc
import zipfile
from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import paramax
import pytest
from flowjax import bijections as fj
from numpy.testing import assert_array_equal

import ddnf
from ddnf import DDNF, Divergence, Exact, PrintedTaylor, Taylor, Unbiased
from ddnf.storage import file as storage
from ddnf.storage.description import describe, rebuild
from ddnf.storage.file import pack, read, unpack, write
from tests.bijections import BIJECTIONS as FLOWS
from tests.bijections import TurningField

OWN = ("own module", "own function")
SQUARE = jnp.array([[1.5, 0.3], [-0.2, 0.7]])


def _affine(*shape):
    return fj.Affine(jr.normal(jr.key(0), shape), jnp.exp(jr.normal(jr.key(1), shape)))


def _flow(log_det=None, **options):
    return DDNF(jr.key(5), 2, blocks=2, steps=3, hidden=(4,), log_det=log_det, **options)


RULES = {
    "exact": Exact(),
    "taylor": Taylor(3),
    "taylor with probes": Taylor(1, probes=2, kind="rademacher"),
    "taylor with a key": Taylor(2, probes=1, key=jr.key(3)),
    "taylor with another kind of key": Taylor(2, probes=1, key=jr.key(3, impl="rbg")),
    "printed": PrintedTaylor(probes=3),
    "divergence": Divergence(),
    "unbiased": Unbiased(terms=2, keep=0.1 + 0.2, probes=4),
}

BIJECTIONS = {
    **{name: make for name, make in FLOWS.items() if name not in OWN},
    **{name: lambda rule=rule: _flow(rule) for name, rule in RULES.items()},
    "reverse": lambda: _flow(inverse="reverse", recompute="segments"),
    "recompute nothing": lambda: _flow(recompute="nothing"),
    "frozen flow": lambda: paramax.non_trainable(_flow(condition_dim=1, context_rank=2)),
    "affine": lambda: _affine(3),
    "affine, scalar": _affine,
    "plain chain": lambda: paramax.unwrap(fj.Chain([_flow(), _affine(2)])),
    "affine, frozen": lambda: paramax.non_trainable(_affine(3)),
    "loc": lambda: fj.Loc(jnp.array([0.1, -jnp.inf, jnp.nan])),
    "scale": lambda: fj.Scale(jnp.array([0.1, 2.0])),
    "lower": lambda: fj.TriangularAffine(jnp.array([1.0, 2.0]), SQUARE),
    "upper": lambda: fj.TriangularAffine(jnp.array([1.0, 2.0]), SQUARE, lower=False),
    "permute": lambda: fj.Permute(jnp.array([[2, 0, 1], [5, 4, 3]])),
    "flip": lambda: fj.Flip((3,)),
    "identity": lambda: fj.Identity((2, 3)),
    "exp": lambda: fj.Exp(),
    "softplus": lambda: fj.SoftPlus((1,)),
    "sigmoid": lambda: fj.Sigmoid((0,)),
    "tanh": lambda: fj.Tanh((4,)),
    "leaky tanh": lambda: fj.LeakyTanh(2.7, (3,)),
    "invert": lambda: fj.Invert(_affine(2)),
    "chain": lambda: fj.Chain([_affine(2), fj.Invert(_flow(condition_dim=3)), fj.Chain([fj.Flip((2,)), fj.Exp((2,))])]),
    "chain, frozen end": lambda: fj.Chain([_flow(), paramax.non_trainable(_affine(2))]),
    "stack": lambda: fj.Stack([_affine(3), fj.Exp((3,))], axis=1),
    "stack of a tuple": lambda: fj.Stack((fj.Identity(), fj.Sigmoid(), _affine())),  # pyright: ignore[reportArgumentType]
    "concatenate": lambda: fj.Concatenate([_affine(2, 3), fj.Tanh((2, 1))], axis=-1),
}


def save(bijection, path):
    write(path, "bijection", {"bijection": describe(bijection)}, pack(bijection))


def load(path):
    _, header, arrays = read(path)
    return unpack(rebuild(header["bijection"]), arrays)


def bits(leaf):
    """All that makes up a leaf, to compare with ==."""
    if eqx.is_array(leaf):
        array = np.asarray(jr.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        return str(leaf.dtype), array.shape, array.tobytes()
    return getattr(leaf, "__qualname__", leaf)


def assert_identical(a, b):
    (leaves, structure), (others, other_structure) = jax.tree.flatten(a), jax.tree.flatten(b)
    assert structure == other_structure
    assert list(map(bits, leaves)) == list(map(bits, others))


def one_line(error):
    text = str(error.value)
    return text.startswith("Expected ") and "; got " in text and "\n" not in text


def attempt(function, argument):
    """What a function returns, or the text of its ValueError; any other error passes."""
    try:
        return function(argument)
    except ValueError as error:
        return str(error)


@cache
def made(name):
    return BIJECTIONS[name]()


def cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a, tree)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("name", BIJECTIONS)
def test_round_trip(name, dtype, tmp_path):
    bijection = cast(made(name), dtype)
    save(bijection, tmp_path / "a.ddnf")
    assert_identical(load(tmp_path / "a.ddnf"), bijection)


@pytest.mark.parametrize("name", ["lower", "upper", "chain", "leaky tanh", "permute"])
def test_same_map(name, tmp_path):
    bijection = made(name)
    save(bijection, tmp_path / "a.ddnf")
    x, condition = jr.normal(jr.key(0), bijection.shape), None
    if bijection.cond_shape is not None:
        condition = jr.normal(jr.key(1), bijection.cond_shape)
    for one, other in zip(
        bijection.transform_and_log_det(x, condition),
        load(tmp_path / "a.ddnf").transform_and_log_det(x, condition),
        strict=True,
    ):
        assert_array_equal(one, other)


@pytest.mark.parametrize("name", BIJECTIONS)
def test_description_is_json_and_computes_nothing(name):
    description = describe(made(name))
    assert json.loads(json.dumps(description)) == description
    assert describe(unpack(rebuild(description), pack(made(name)))) == description
    assert not any(eqx.is_array(leaf) for leaf in jax.tree.leaves(rebuild(description)))


def test_settings_of_a_flow():
    flow = DDNF(
        *(jr.key(0), 3),
        **dict(blocks=2, steps=5, hidden=(4, 2), condition_dim=6, activation="sin", context_rank=1),
        **dict(solver=ddnf.rk4, log_det=Taylor(1), inverse="reverse", lipschitz=0.5, recompute="nothing"),
    )
    assert describe(flow) == {
        **{"type": "DDNF", "dim": 3, "blocks": 2, "steps": 5, "hidden": [4, 2], "condition_dim": 6},
        **{"activation": "sin", "context_rank": 1, "solver": "rk4", "inverse": "reverse", "lipschitz": 0.5},
        **{"log_det": {"type": "Taylor", "order": 1, "probes": None, "kind": "gaussian", "key": None}},
        **{"recompute": "nothing", "frozen": False},
    }


def test_numpy_settings():
    assert json.dumps(describe(fj.Exp((np.int64(3),)))) == '{"type": "Exp", "shape": [3]}'  # pyright: ignore[reportArgumentType]


class Affine(fj.Exp):
    """One's own, with the name of a known one."""


def heun(velocity, z, dt):
    half = z + dt * velocity(z)
    return z + dt / 2 * (velocity(z) + velocity(half))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: FLOWS["own module"](), "TurningField"),
        (lambda: FLOWS["own function"](), "lambda"),
        (lambda: _flow(solver=heun), "heun"),
        (lambda: Affine(), "test_storage.Affine"),
        (lambda: fj.Chain([_affine(2), fj.Planar(jr.key(0), dim=2)]), "Planar"),
        (lambda: fj.Chain([paramax.NonTrainable(fj.Exp())]), "NonTrainable"),
        (lambda: eqx.tree_at(lambda a: a.scale.fn, _affine(2), jnp.exp), "parts were replaced"),
        (lambda: eqx.filter_vmap(fj.Affine)(jnp.ones((3, 2))), "stacked"),
        (lambda: eqx.tree_at(lambda f: f.fields.biases, _flow(), replace_fn=paramax.NonTrainable), "replaced"),
        (lambda: _flow(Taylor(1, probes=1, key=jr.PRNGKey(0))), "replaced"),
    ],
)
def test_unknown_parts(make, what):
    with pytest.raises(ValueError, match=f"{what}.*like=") as error:
        describe(make())
    assert one_line(error)


def test_own_field_by_like(tmp_path):
    flow, like = (DDNF(jr.key(seed), 2, field=TurningField) for seed in (0, 1))
    write(tmp_path / "a.ddnf", "own", {}, pack(flow))
    assert_identical(unpack(like, read(tmp_path / "a.ddnf")[2]), flow)


MALFORMED = [
    *(None, [], "Affine", 3, {}, {"type": "Affine"}, {"type": ["Affine"]}, {"type": None}),
    {"type": "os.system", "shape": [1]},
    {"type": "Exact"},
    {"type": "Invert", "bijection": {"type": "Exact"}},
    {"type": "Chain", "bijections": []},
    {"type": "Stack", "bijections": [], "container": "list", "axis": 0},
    {"type": "Chain", "bijections": [{"type": "Exp", "shape": [2]}, {"type": "Exp", "shape": [3]}]},
    {"type": "Exp", "shape": [-1]},
    {"type": "Exp", "shape": [True]},
    {"type": "Exp", "shape": [2], "more": 1},
    {"type": "Affine", "shape": [2.0], "frozen": False},
    {"type": "TriangularAffine", "dim": -1, "lower": True, "frozen": False},
]


@pytest.mark.parametrize("description", MALFORMED, ids=str)
def test_malformed_description(description):
    with pytest.raises(ValueError, match="Expected a description of a bijection") as error:
        rebuild(description)
    assert one_line(error)


def test_endless_description():
    description = {"type": "Exp", "shape": []}
    for _ in range(20_000):
        description = {"type": "Invert", "bijection": description}
    with pytest.raises(ValueError, match="at most 200 parts"):
        rebuild(description)


@pytest.mark.parametrize("name", ["unbiased", "guaranteed, condition", "leaky tanh", "concatenate", "invert", "upper"])
def test_random_changes_of_a_description(name):
    """Each setting in turn becomes each of these: a bijection or a ValueError, nothing else."""
    text = json.dumps(describe(made(name)))
    junk = [
        None,
        True,
        -1,
        0,
        3,
        10**30,
        0.5,
        float("nan"),
        float("inf"),
        "",
        "tanh",
        "é\n",
        [],
        [1],
        {},
        {"type": "Exact"},
    ]

    def places(node):
        for key in node if isinstance(node, dict) else range(len(node)):
            yield node, key
            if isinstance(node[key], dict | list):
                yield from places(node[key])

    for number in range(len(list(places(json.loads(text))))):
        for value in junk:
            description = json.loads(text)
            node, key = list(places(description))[number]
            node[key] = value
            found = attempt(rebuild, description)
            assert isinstance(found, fj.AbstractBijection) or "\n" not in found


ARRAYS = {
    "float32": np.array([0.1, -0.0, np.nan, np.inf], np.float32),
    "float64, scalar": np.array(0.1),
    "int64": np.arange(6).reshape(2, 3).T,
    "uint32": np.array([2**32 - 1], np.uint32),
    "uint8, empty": np.zeros((0, 3), np.uint8),
    "bool ключ ∂": np.array([True, False]),
    "backwards": np.arange(5.0)[::-1],
}


def test_arrays_and_names(tmp_path):
    header = {"имя": "Zoë ∂ 🌊 \udc80", "nested": [1, 2.5, None, {"a": True}], "inf": float("inf")}
    write(str(tmp_path / "модель.ddnf"), "вид", header, ARRAYS | {"big-endian": np.arange(3, dtype=">i4")})
    kind, found, arrays = read(tmp_path / "модель.ddnf")
    assert (kind, found) == ("вид", header)
    assert arrays.pop("big-endian").tolist() == [0, 1, 2]
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (array.dtype, array.shape, array.tobytes()) == (
            *(arrays[name].dtype, arrays[name].shape),
            arrays[name].tobytes(),
        )


def test_no_arrays(tmp_path):
    write(tmp_path / "a.ddnf", "empty", {}, {})
    assert read(tmp_path / "a.ddnf") == ("empty", {}, {})


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([1j]), np.array([None]), jnp.ones(2, jnp.bfloat16)])
def test_arrays_that_are_not_stored(array, tmp_path):
    with pytest.raises(ValueError, match="Expected arrays of floats"):
        write(tmp_path / "a.ddnf", "kind", {}, {"a": np.asarray(array)})
    assert not list(tmp_path.iterdir())


def test_metadata_for_other_readers(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    write(tmp_path / "a.ddnf", "example", {"é": 1}, {"x": np.arange(3.0)})
    with safetensors.safe_open(tmp_path / "a.ddnf", "np") as file:
        metadata = file.metadata()
        assert_array_equal(file.get_tensor("x"), np.arange(3.0))
    assert metadata["format"] == "ddnf" and metadata["format_version"] == "1" and metadata["kind"] == "example"
    assert json.loads(metadata["header"]) == {"é": 1}
    assert json.loads(metadata["versions"]).keys() == {"ddnf", "jax", "equinox", "flowjax"}
    assert len(metadata["digest"]) == 64


def test_same_model_same_file(tmp_path):
    for name in "ab":
        save(_flow(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_without_64_bits(tmp_path):
    tree = {"x": jnp.array([0.1, 1e300]), "i": jnp.arange(3), "n": np.array([0.1])}
    assert tree["x"].dtype == jnp.float64
    write(tmp_path / "a.ddnf", "tree", {}, pack(tree))
    save(BIJECTIONS["permute"](), tmp_path / "b.ddnf")
    with jax.enable_x64(False):
        found = unpack(tree, read(tmp_path / "a.ddnf")[2])
        permute = load(tmp_path / "b.ddnf")
        assert permute.transform(jnp.arange(6.0).reshape(2, 3)).tolist() == [[2, 0, 1], [5, 4, 3]]
    assert found["x"].dtype == jnp.float32 and found["i"].dtype == jnp.int32
    assert found["x"].tolist() == [np.float32(0.1), np.inf]
    assert isinstance(found["n"], np.ndarray) and found["n"].dtype == np.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("['a'][0]"), r"Expected an array \"\['a'\]\[0\]\"; got none"),
        (lambda arrays: arrays.update(more=np.ones(1)), "got 'more'"),
        (lambda arrays: arrays.update({"['b']": np.ones((2, 1))}), r"float64\[2\] for .*'b'.*; got float64\[2, 1\]"),
        (lambda arrays: arrays.update({"['b']": np.ones(2, int)}), r"float64\[2\] for .*; got int64\[2\]"),
        (lambda arrays: arrays.update({"['key']": np.ones(4, np.uint32)}), r"uint32\[2\] for .*; got uint32\[4\]"),
    ],
)
def test_arrays_that_do_not_fit(change, message):
    tree = {"a": (jnp.zeros(3), "text", 4), "b": np.zeros(2), "key": jr.key(0), "none": None}
    arrays = pack(tree)
    assert_identical(unpack(tree, arrays), tree)
    change(arrays)
    with pytest.raises(ValueError, match=message) as error:
        unpack(tree, arrays)
    assert one_line(error)


def test_unpacked_arrays_are_copies():
    arrays = {"['a']": np.zeros(100), "['b']": np.zeros(100)}
    tree = unpack({"a": jnp.ones(100), "b": np.ones(100)}, arrays)
    for array in arrays.values():
        array += 1
    assert not tree["a"].any() and not tree["b"].any()


def _flip_bit(data, rng, header):
    place = rng.integers(8 * len(data))
    data[place // 8] ^= 1 << place % 8


def _change_byte(data, rng, header):
    data[rng.integers(len(data))] = rng.integers(256)


def _change_digit(data, rng, header):
    digits = [i for i in range(8, header) if chr(data[i]).isdigit()]
    data[rng.choice(digits)] = ord("0") + rng.integers(10)


def _truncate(data, rng, header):
    del data[rng.integers(len(data)) :]


def _insert(data, rng, header):
    place = rng.integers(len(data) + 1)
    data[place:place] = rng.bytes(rng.integers(1, 9))


def _delete(data, rng, header):
    place = rng.integers(len(data))
    del data[place : place + rng.integers(1, 9)]


def _swap_blocks(data, rng, header):
    size = rng.integers(1, 33)
    one, other = rng.integers(len(data) - size, size=2)
    data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]


def _change_length(data, rng, header):
    data[:8] = struct.pack("<Q", (0, 1, 2, header, len(data), 2**31, 2**40, 2**64 - 1)[rng.integers(8)])


def _edit_header(data, rng, header):
    """Changes, removes or renames an entry of the JSON header, and sets the length right."""
    head = json.loads(data[8:header])
    node = head
    while True:
        key = rng.choice(sorted(node)) if isinstance(node, dict) else int(rng.integers(len(node)))
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.3:
            break
        node = node[key]
    action = rng.integers(3)
    if action == 0:
        node[key] = [None, -1, 0, 7, 2**63, 1e400, "F64", "1", "", "{}", [], [2, 2], {}][rng.integers(13)]
    elif action == 1 or isinstance(node, list):
        node.pop(key)
    else:
        node[f"{key}x"] = node.pop(key)
    text = json.dumps(head).encode()
    data[:header] = struct.pack("<Q", len(text)) + text


CORRUPTIONS = [
    *(_flip_bit, _change_byte, _change_digit, _truncate, _insert, _delete, _swap_blocks, _change_length),
    *(_edit_header, _edit_header),
]


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_corruption(tmp_path, count):
    """Damaged files: each is one clear error, or still holds the same model."""
    path, rng = tmp_path / "a.ddnf", np.random.default_rng(0)
    save(fj.Chain([_affine(2), _flow(condition_dim=1)]), path)
    kind, header, arrays = read(path)
    good, errors = path.read_bytes(), 0
    for number in range(count):
        data = bytearray(good)
        CORRUPTIONS[number % len(CORRUPTIONS)](data, rng, 8 + int.from_bytes(good[:8], "little"))
        path.write_bytes(data)
        start = time.process_time()
        found = attempt(read, path)
        assert time.process_time() - start < 5
        if isinstance(found, str):
            errors += 1
            assert found.startswith("Expected a ddnf model file; got ") and "\n" not in found
        else:
            assert found[:2] == (kind, header)
            assert_identical(jax.tree.map(jnp.asarray, found[2]), jax.tree.map(jnp.asarray, arrays))
    assert errors > 0.8 * count


def _safetensors(metadata):
    from safetensors.numpy import save

    return save({"x": np.ones(3)}, metadata)


DEEP = b'{"__metadata__":' + 100_000 * b"["

FOREIGN = {
    "empty": b"",
    "short": b"abc",
    "zeros": bytes(1000),
    "random": np.random.default_rng(0).bytes(5000),
    "PNG": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(100),
    "JSON": b'{"__metadata__": {"format": "ddnf"}}',
    "pickle": b"\x80\x04\x95\x15\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "safetensors": _safetensors(None),
    "safetensors of others": _safetensors({"format": "pt"}),
    "safetensors with our name only": _safetensors({"format": "ddnf"}),
    "endless header": struct.pack("<Q", 2**63) + b"{}" + bytes(100),
    "deep header": struct.pack("<Q", len(DEEP)) + DEEP,
    "list": struct.pack("<Q", 2) + b"[]",
    "number": struct.pack("<Q", 2) + b"10",
    "metadata of another type": struct.pack("<Q", 20) + b'{"__metadata__": []} ',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_file(name, tmp_path):
    (tmp_path / "a.ddnf").write_bytes(FOREIGN[name])
    with pytest.raises(ValueError, match=r"Expected a ddnf model file; got .*of another format") as error:
        read(tmp_path / "a.ddnf")
    assert one_line(error)


def test_folders_archives_and_missing_files(tmp_path):
    with pytest.raises(ValueError, match="a folder"):
        read(tmp_path)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a", "text")
    with pytest.raises(ValueError, match="of another format"):
        read(tmp_path / "a.npz")
    with pytest.raises(FileNotFoundError, match="missing"):
        read(tmp_path / "missing.ddnf")


def test_absurd_length_takes_no_memory(tmp_path):
    (tmp_path / "a.ddnf").write_bytes(struct.pack("<Q", 2**40) + bytes(100))
    with open(tmp_path / "a.ddnf", "r+b") as file:
        file.truncate(2**41)  # a hole: takes no space on the disk
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="another format"):
            read(tmp_path / "a.ddnf")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_newer_format(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(storage, "FORMAT_VERSION", 7)
        write(tmp_path / "a.ddnf", "example", {}, {})
    with pytest.raises(ValueError, match=r"format 7.*upgrade ddnf") as error:
        read(tmp_path / "a.ddnf")
    assert one_line(error)


def test_older_format(tmp_path, monkeypatch):
    write(tmp_path / "a.ddnf", "example", {"a": 1}, {"x": np.ones(2)})
    monkeypatch.setattr(storage, "FORMAT_VERSION", 3)
    monkeypatch.setitem(storage.UPGRADES, 1, lambda kind, header, arrays: (kind, {"b": header["a"]}, arrays))
    with pytest.raises(ValueError, match=r"format '1', unknown"):
        read(tmp_path / "a.ddnf")
    monkeypatch.setitem(storage.UPGRADES, 2, lambda kind, header, arrays: (kind, header | {"c": 3}, arrays))
    assert read(tmp_path / "a.ddnf")[1] == {"b": 1, "c": 3}


def test_only_a_model_is_replaced(tmp_path):
    path = tmp_path / "a.ddnf"
    for number in range(2):
        write(path, "model", {"number": number}, {})
    assert read(path)[1] == {"number": 1}
    for content in (b"", b"thesis", b"\0" * 50, path.read_bytes()[:40]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"or a ddnf model to replace.*overwrite=True"):
            write(path, "model", {}, {})
        assert path.read_bytes() == content
    write(path, "model", {}, {}, overwrite=True)
    assert read(path) == ("model", {}, {})
