"""The catalog of flows: named constructors of FlowJAX bijections from the literature."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

import jax.random as jr
from flowjax.bijections import AbstractBijection, Chain, Invert, RationalQuadraticSpline
from jaxtyping import PRNGKeyArray

from ddnf.flows.affine import DiagonalAffine, FullAffine
from ddnf.flows.autoregressive import block, floored_affine, masked
from ddnf.flows.householder import Householder
from ddnf.flows.ode import CNF
from ddnf.flows.parameters import stack
from ddnf.flows.planar import Planar
from ddnf.flows.radial import Radial
from ddnf.flows.sigmoidal import DeepSigmoidal
from ddnf.flows.sylvester import Sylvester

_CONDITION_UNITS = "hidden units of the network from the condition to the parameters; no effect without a condition"
_CONDITIONER_UNITS = "hidden units in each of the conditioner's two layers"
_FIELD_UNITS = "hidden units in each of the field's two layers"
_REZENDE = "Rezende and Mohamed, 2015"


@dataclasses.dataclass(frozen=True)
class Baseline:
    """One entry of the catalog.

    Attributes:
        title: name in tables and figures.
        reference: authors and year.
        build: from key, dim, layers, condition_dim and size to the bijection; call it through `make`.
        size: default width.
        size_means: what the width is.
        is_forward_fast: whether noise -> z is the fast direction, as needed for variational inference, or z -> noise.
        min_dim: smallest dimension that it supports without a condition.
        has_layers: whether it has a number of layers.
        learning_rate: peak learning rate of Adam that trained best on the paper's toy energies.
        rate_falls: whether this rate is for two layers, and decreases as 2 / layers for more.
    """

    title: str
    reference: str
    build: Callable[[PRNGKeyArray, int, int, int | None, int], AbstractBijection]
    size: int
    size_means: str
    is_forward_fast: bool = True
    min_dim: int = 1
    has_layers: bool = True
    learning_rate: float = 5e-3
    rate_falls: bool = False


def make(
    name: str,
    key: PRNGKeyArray,
    dim: int,
    layers: int = 1,
    condition_dim: int | None = None,
    size: int | None = None,
) -> AbstractBijection:
    """Builds a flow by its name in `BASELINES`: a bijection of shape (dim,), initialised as by its authors.

    Most start near the identity.

    Args:
        name: key of the entry.
        key: random key of the weights.
        dim: dimension.
        layers: number of layers, K.
        condition_dim: dimension of the condition; None for none.
        size: width, as described by the entry's `size_means`; None for its default.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> flow = make("naf", jr.key(0), 2, layers=3)
        >>> flow.transform(jnp.zeros(2)).shape
        (2,)
    """
    _check(name, dim, layers, condition_dim, size)
    baseline = BASELINES[name]
    return baseline.build(key, dim, layers, condition_dim, baseline.size if size is None else size)


def _stacked(layer, key, dim, layers, condition_dim, size):
    return stack(key, layers, lambda key: layer(key, dim, condition_dim=condition_dim, size=size))


def _single(bijection, key, dim, layers, condition_dim, size):
    return bijection(key, dim, condition_dim=condition_dim, size=size)


def _planar_affine(key, dim, layers, condition_dim, size):
    def layer(key):
        planar_key, affine_key = jr.split(key)
        options = dict(condition_dim=condition_dim, size=size)
        return Chain([Planar(planar_key, dim, **options), DiagonalAffine(affine_key, dim, **options)])

    return stack(key, layers, layer)


def _householder(key, dim, layers, condition_dim, size):
    affine_key, reflections_key = jr.split(key)
    reflections = _stacked(Householder, reflections_key, dim, layers, condition_dim, size)
    return Chain([DiagonalAffine(affine_key, dim, condition_dim=condition_dim, size=size), reflections])


def _sylvester(key, dim, layers, condition_dim, size):
    return stack(key, layers, lambda key: Sylvester(key, dim, rank=min(size, dim), condition_dim=condition_dim))


def _masked(transformer, key, dim, layers, condition_dim, size):
    return masked(key, dim, transformer=transformer(), layers=layers, condition_dim=condition_dim, size=size)


def _continuous(hutchinson, key, dim, layers, condition_dim, size):
    return CNF(key, dim, layers=layers, condition_dim=condition_dim, size=size, hutchinson=hutchinson)


def _inverted(build, *arguments):
    return Invert(build(*arguments))


def _block(key, dim, layers, condition_dim, size):
    return block(key, dim, layers=layers, condition_dim=condition_dim, size=size)


_iaf = partial(_masked, floored_affine)
_spline_iaf = partial(_masked, partial(RationalQuadraticSpline, knots=8, interval=5))
# Gaussians have one affine layer.
_gaussian = partial(Baseline, size=32, size_means=_CONDITION_UNITS, has_layers=False, learning_rate=0.05)
# Layers whose parameters are free, or predicted from the condition.
_layered = partial(Baseline, size=32, size_means=_CONDITION_UNITS, learning_rate=0.05)
_autoregressive = partial(Baseline, size=64, size_means=_CONDITIONER_UNITS, min_dim=2)

BASELINES: Mapping[str, Baseline] = {
    "affine": _gaussian("mean-field Gaussian", "", partial(_single, DiagonalAffine)),
    "affine-full": _gaussian("full-rank Gaussian", "", partial(_single, FullAffine)),
    "planar": _layered("planar", _REZENDE, partial(_stacked, Planar)),
    # The paper's Appendix B does not say where its scale and drift go: here after each layer.
    "planar-affine": _layered("planar, scale, shift", _REZENDE, _planar_affine),
    "radial": _layered("radial", _REZENDE, partial(_stacked, Radial)),
    # Reflections alone leave a standard normal unchanged: the diagonal Gaussian of the authors' encoder comes first.
    "householder": _layered("Householder", "Tomczak and Welling, 2016", _householder),
    "sylvester": _layered(
        "Sylvester", "van den Berg et al., 2018", _sylvester, size=16, size_means="M, the rank of a layer; at most dim"
    ),
    "iaf": _autoregressive("IAF", "Kingma et al., 2016", _iaf, learning_rate=0.01),
    "maf": _autoregressive(
        "MAF", "Papamakarios et al., 2017", partial(_inverted, _iaf), is_forward_fast=False, learning_rate=0.01
    ),
    "spline-iaf": _autoregressive("spline IAF", "Durkan et al., 2019", _spline_iaf),
    "spline-maf": _autoregressive(
        "spline MAF", "Durkan et al., 2019", partial(_inverted, _spline_iaf), is_forward_fast=False
    ),
    "naf": _autoregressive(
        "NAF", "Huang et al., 2018", partial(_masked, partial(DeepSigmoidal, 16)), learning_rate=0.01
    ),
    "bnaf": Baseline(
        "BNAF",
        "De Cao et al., 2019",
        _block,
        8,
        "hidden units per dimension, in each of two layers",
        learning_rate=0.02,
        rate_falls=True,
    ),
    "cnf": Baseline("CNF", "Chen et al., 2018", partial(_continuous, False), 64, _FIELD_UNITS),
    # Its log-determinant is an estimate; `for_evaluation` gives the same map with the exact one.
    "cnf-hutchinson": Baseline("FFJORD", "Grathwohl et al., 2019", partial(_continuous, True), 64, _FIELD_UNITS),
}


def _check(name, dim, layers, condition_dim, size):
    if name not in BASELINES:
        raise ValueError(f"Expected one of {', '.join(BASELINES)}; got {name!r}.")
    min_dim = BASELINES[name].min_dim if condition_dim is None else 1
    if dim < min_dim:
        raise ValueError(f"Expected dim of at least {min_dim} for {name}; got {dim}.")
    for argument, value in (("layers", layers), ("condition_dim", condition_dim), ("size", size)):
        if value is not None and value < 1:
            raise ValueError(f"Expected {argument} of at least 1; got {value}.")
