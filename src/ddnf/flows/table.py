"""The table of rivals: each a named constructor of a FlowJAX bijection."""

import dataclasses
from collections.abc import Callable
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

_OF_CONDITION = "hidden units of the map from the condition to the parameters; without a condition of no effect"
_OF_CONDITIONER = "hidden units in each of the conditioner's two layers"
_REZENDE = "Rezende and Mohamed, 2015"


@dataclasses.dataclass(frozen=True)
class Rival:
    """One row of the table.

    Attributes:
        title: its name in tables and figures.
        reference: authors and year.
        build: from key, dim, layers, condition_dim and size to the bijection; call it through `make`.
        size: default of its one width.
        size_means: what that width is.
        is_forward_fast: whether noise -> z is the fast direction, as variational inference wants it; else z -> noise.
        is_exact: whether its log-determinant is one; if not, `exactly` gives the same map with an exact one.
        takes_condition: whether it may depend on a condition.
        least_dim: the smallest dimension that it works in.
        has_layers: whether `layers` means anything to it.
        learning_rate: of Adam, at its height, with which it trained best on the paper's toy energies.
        rate_falls: whether that is for two layers, and 2 / layers of it for more.
    """

    title: str
    reference: str
    build: Callable[[PRNGKeyArray, int, int, int | None, int], AbstractBijection]
    size: int
    size_means: str
    is_forward_fast: bool = True
    is_exact: bool = True
    takes_condition: bool = True
    least_dim: int = 1
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
    """A rival by its name in `RIVALS`: a bijection of shape (dim,), close to the identity or as its authors start it.

    Args:
        name: the key of its row.
        key: random key of the weights.
        dim: dimension.
        layers: number of layers, K.
        condition_dim: dimension of the condition; None for a bijection without.
        size: its width, whose meaning is in the row; None for the default there.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> flow = make("naf", jr.key(0), 2, layers=3)
        >>> flow.transform(jnp.zeros(2)).shape
        (2,)
    """
    _check(name, dim, layers, condition_dim, size)
    rival = RIVALS[name]
    return rival.build(key, dim, layers, condition_dim, rival.size if size is None else size)


def _stacked(layer, key, dim, layers, condition_dim, size):
    return stack(key, layers, lambda key: layer(key, dim, condition_dim=condition_dim, size=size))


def _single(bijection, key, dim, layers, condition_dim, size):
    return bijection(key, dim, condition_dim=condition_dim, size=size)


def _planar_affine(key, dim, layers, condition_dim, size):
    def layer(key):
        first, second = jr.split(key)
        options = dict(condition_dim=condition_dim, size=size)
        return Chain([Planar(first, dim, **options), DiagonalAffine(second, dim, **options)])

    return stack(key, layers, layer)


def _householder(key, dim, layers, condition_dim, size):
    first, second = jr.split(key)
    reflections = _stacked(Householder, second, dim, layers, condition_dim, size)
    return Chain([DiagonalAffine(first, dim, condition_dim=condition_dim, size=size), reflections])


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


_SPLINE = partial(RationalQuadraticSpline, knots=8, interval=5)

RIVALS = {
    "affine": Rival(
        "mean-field Gaussian",
        "",
        partial(_single, DiagonalAffine),
        32,
        _OF_CONDITION,
        has_layers=False,
        learning_rate=0.05,
    ),
    "affine-full": Rival(
        "full-rank Gaussian", "", partial(_single, FullAffine), 32, _OF_CONDITION, has_layers=False, learning_rate=0.05
    ),
    "planar": Rival("planar", _REZENDE, partial(_stacked, Planar), 32, _OF_CONDITION, learning_rate=0.05),
    # The paper's Appendix B does not say where its scale and drift go: here after each layer.
    "planar-affine": Rival("planar, scale, shift", _REZENDE, _planar_affine, 32, _OF_CONDITION, learning_rate=0.05),
    "radial": Rival("radial", _REZENDE, partial(_stacked, Radial), 32, _OF_CONDITION, learning_rate=0.05),
    # Reflections alone leave a standard normal as it is: first comes the diagonal Gaussian of the authors' encoder.
    "householder": Rival(
        "Householder", "Tomczak and Welling, 2016", _householder, 32, _OF_CONDITION, learning_rate=0.05
    ),
    "sylvester": Rival(
        "Sylvester",
        "van den Berg et al., 2018",
        _sylvester,
        16,
        "M, the rank of a layer; at most dim",
        learning_rate=0.05,
    ),
    "iaf": Rival(
        "IAF",
        "Kingma et al., 2016",
        partial(_masked, floored_affine),
        64,
        _OF_CONDITIONER,
        least_dim=2,
        learning_rate=0.01,
    ),
    "maf": Rival(
        "MAF",
        "Papamakarios et al., 2017",
        partial(_inverted, partial(_masked, floored_affine)),
        64,
        _OF_CONDITIONER,
        is_forward_fast=False,
        least_dim=2,
        learning_rate=0.01,
    ),
    "spline-iaf": Rival(
        "spline IAF", "Durkan et al., 2019", partial(_masked, _SPLINE), 64, _OF_CONDITIONER, least_dim=2
    ),
    "spline-maf": Rival(
        "spline MAF",
        "Durkan et al., 2019",
        partial(_inverted, partial(_masked, _SPLINE)),
        64,
        _OF_CONDITIONER,
        is_forward_fast=False,
        least_dim=2,
    ),
    "naf": Rival(
        "NAF",
        "Huang et al., 2018",
        partial(_masked, partial(DeepSigmoidal, 16)),
        64,
        _OF_CONDITIONER,
        least_dim=2,
        learning_rate=0.01,
    ),
    "bnaf": Rival(
        "BNAF",
        "De Cao et al., 2019",
        _block,
        8,
        "hidden units for each dimension, in each of two layers",
        learning_rate=0.02,
        rate_falls=True,
    ),
    "cnf": Rival(
        "CNF",
        "Chen et al., 2018",
        partial(_continuous, False),
        64,
        "hidden units in each of the field's two layers",
    ),
    "cnf-hutchinson": Rival(
        "FFJORD",
        "Grathwohl et al., 2019",
        partial(_continuous, True),
        64,
        "hidden units in each of the field's two layers",
        is_exact=False,
    ),
}


def _check(name, dim, layers, condition_dim, size):
    if name not in RIVALS:
        raise ValueError(f"Expected one of {', '.join(RIVALS)}; got {name!r}.")
    rival = RIVALS[name]
    if dim < rival.least_dim:
        raise ValueError(f"Expected dim of at least {rival.least_dim} for {name}; got {dim}.")
    for what, value in (("layers", layers), ("condition_dim", condition_dim), ("size", size)):
        if value is not None and value < 1:
            raise ValueError(f"Expected {what} of at least 1; got {value}.")
    if condition_dim is not None and not rival.takes_condition:
        raise ValueError(f"Expected no condition for {name}; got condition_dim {condition_dim}.")
