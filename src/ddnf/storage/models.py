"""Fitted models in files: `save` and `load` of posteriors and densities."""

import dataclasses
import warnings
from os import PathLike
from typing import Any

import numpy as np
from flowjax.bijections import AbstractBijection

from ddnf.density.columns import Column
from ddnf.density.mixture import Mixture
from ddnf.density.result import Density
from ddnf.posterior.log import Log, Row
from ddnf.posterior.mixture import ModeMixture
from ddnf.posterior.result import Posterior
from ddnf.posterior.sites import Site, describe_target, missing_names
from ddnf.posterior.target import Target
from ddnf.storage.chains import CHAIN_FIGURES, pack_chains, unpack_chains
from ddnf.storage.consistency import check_density, check_finite, check_flow, check_issues, check_posterior
from ddnf.storage.description import describe, restore
from ddnf.storage.file import pack, read, unpack, write
from ddnf.storage.schema import describe_schema, restore_schema

_POSTERIOR = ("elbo", "elbo_error", "log_evidence", "khat", "ess")
_MIXTURE = ("log_weights", "means", "scales")
_DENSITY = ("log_likelihood", "train_log_likelihood")
# Older files lack these.
_DENSITY_LATER = {
    "log_likelihood_error": float("nan"),
    "train_rows": 0,
    "held_out_rows": 0,
    "is_trained": True,
    "dropped_rows": 0,
    "has_all_rows": False,
}
_DENSITY_ARRAYS = ("mean", "scale", "condition_mean", "condition_scale", "losses", "values", "seconds")


def save(path: str | PathLike, model: Posterior | Density, *, overwrite: bool = False) -> None:
    """Writes a model to one file: safetensors, with a JSON header.

    Args:
        path: the file; an existing model is replaced.
        model: what to save.
        overwrite: whether a file that is not a model may be replaced too.
    """
    check_flow(model.flow)
    try:
        header: dict[str, Any] = dict(flow=describe(model.flow))
    except ValueError as error:  # a flow of the user's own
        header = dict(flow=None, reason=str(error))
    header["issues"] = list(model.issues)
    arrays = {f"flow{name}": array for name, array in pack(model.flow).items()}
    if isinstance(model, Posterior):
        figures = {name: getattr(model, name) for name in _POSTERIOR}
        error = model.log_evidence_error
        figures["log_evidence_error"] = None if error != error else error
        sites = model.sites if model.target is None else describe_target(model.target)
        rows = [[None if cell != cell else cell for cell in row] for row in model.log]  # JSON has no NaN
        if model.base is not None:
            arrays |= {f"base.{name}": np.asarray(getattr(model.base, name)) for name in _MIXTURE}
        if model.chains is not None:
            arrays |= {f"chains.{name}": array for name, array in pack_chains(model.chains).items()}
            header["chains"] = {name: getattr(model.chains, name) for name in CHAIN_FIGURES}
        header |= dict(figures=figures, sites=[list(site) for site in sites], log=rows, stage=model.stage)
        write(path, "posterior", header, arrays | dict(losses=model.losses, seconds=model.seconds), overwrite=overwrite)
        return
    figures = {name: getattr(model, name) for name in (*_DENSITY, *_DENSITY_LATER)}
    header |= dict(figures=figures, columns=[list(column) for column in model.columns], names=model.names)
    held = {name: array for name in _DENSITY_ARRAYS if (array := getattr(model, name)) is not None}
    if model.base is not None:
        header |= dict(components=len(model.base.logits))
        held |= {f"base{name}": array for name, array in pack(model.base).items()}
    described, counted = describe_schema(model)
    write(path, "density", header | described, arrays | held | counted, overwrite=overwrite)


def load(
    path: str | PathLike, *, target: Target | None = None, like: AbstractBijection | None = None
) -> Posterior | Density:
    """Loads a posterior or a density from a file. This runs no code from the file, which only contains data.

    Args:
        path: a file that `save` has written.
        target: the target of the posterior, for named draws and importance weights; the file does not store it.
        like: a bijection of the same structure, for a flow with custom fields or parts.

    Example:
        >>> import ddnf, jax.random as jr, numpy as np, tempfile
        >>> x = np.random.default_rng(0).normal(size=(100, 2))
        >>> density = ddnf.fit_density(jr.key(0), x, steps=10, progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     density.save(f"{folder}/model.ddnf")
        ...     loaded = ddnf.load(f"{folder}/model.ddnf")
        >>> bool((loaded.log_prob(x) == density.log_prob(x)).all())
        True
    """
    kind, header, arrays = read(path)
    try:
        if kind not in _READERS:
            raise ValueError(f"Expected a posterior or a density; got a file with a {kind!r}.")
        flow = _flow(header, arrays, like)
        check_flow(flow)
        issues = tuple(header.get("issues", header.get("complaints", ())))
        check_issues(issues)
        arrays.setdefault("seconds", np.full_like(arrays["losses"], np.nan))  # older files have none
        model = _READERS[kind](flow, header, arrays, issues)
    except ImportError:  # an optional library is missing
        raise
    except Exception as error:  # a malformed header can raise any error
        is_ours = isinstance(error, ValueError) and str(error).startswith("Expected")
        text = str(error) if is_ours else f"Expected a complete model file; got {error!r:.300}."
        raise ValueError(f"{text} In {str(path)!r}.") from error
    if target is not None and flow.shape != (target.dim,):
        raise ValueError(f"Expected a target of {flow.shape[0]} dimensions; got {target.dim}.")
    if isinstance(model, Posterior):
        model = dataclasses.replace(model, target=target)
        if target is None and (missing := missing_names(model.sites)):
            _warn_missing(missing)
    return model


def _posterior(flow, header, arrays, issues) -> Posterior:
    elbo, error, log_evidence, khat, ess = (float(header["figures"][name]) for name in _POSTERIOR)
    sites = tuple(Site(name, tuple(shape), *rest) for name, shape, *rest in header.get("sites", ()))
    log = Log(_row(row) for row in header.get("log", ()))
    course = arrays["losses"], arrays["seconds"]
    posterior = Posterior(flow, None, elbo, error, log_evidence, khat, ess, issues, *course)
    base = ModeMixture(*(arrays[f"base.{name}"] for name in _MIXTURE)) if "base.means" in arrays else None
    posterior = dataclasses.replace(
        posterior,
        log=log,
        stage=str(header.get("stage", "")),
        sites=sites,
        base=base,
        log_evidence_error=_number(header["figures"].get("log_evidence_error")),
        chains=unpack_chains(header["chains"], arrays, flow.shape[0]) if "chains" in header else None,
    )
    check_posterior(posterior)
    return posterior


def _density(flow, header, arrays, issues) -> Density:
    held: dict[str, Any] = {name: float(header["figures"][name]) for name in _DENSITY}
    held |= {name: _figure(name, header["figures"].get(name, none), none) for name, none in _DENSITY_LATER.items()}
    held |= {name: arrays.get(name) for name in _DENSITY_ARRAYS}
    columns = tuple(Column(low, high, integer) for low, high, integer in header["columns"])
    names = None if header["names"] is None else tuple(header["names"])
    base = _base(header.get("components"), flow.shape[0], arrays)
    schema, categories = restore_schema(header, arrays)
    density = Density(
        flow, columns, names=names, issues=issues, base=base, schema=schema, categories=categories, **held
    )
    check_density(density)
    return density


def _figure(name: str, value: Any, default: Any) -> Any:
    """A figure that older files do not have, of the type of its default."""
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ValueError(f"Expected {name} to be true or false; got {value!r:.60}.")
    return type(default)(value)


def _base(components: Any, dim: int, arrays: dict[str, np.ndarray]) -> Mixture | None:
    if components is None:
        return None
    held = {name[4:]: array for name, array in arrays.items() if name.startswith("base")}
    if type(components) is not int or not 1 <= components * dim**2 <= sum(array.size for array in held.values()):
        raise ValueError(f"Expected the number of Gaussians of a mixture; got {components!r}.")
    check_finite(held.values())
    has_freedoms = any("log_freedoms" in name for name in held)  # older files have Gaussians
    return unpack(Mixture.template(components, dim, freedom=2.0 if has_freedoms else None), held)


_READERS = {"posterior": _posterior, "density": _density}


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _row(cells: list[Any]) -> Row:
    stage, seconds, gradients, *figures, decision = (np.nan if cell is None else cell for cell in cells)
    elbo, khat, ess = (float(figure) for figure in figures)
    return Row(str(stage), float(seconds), int(gradients), elbo, khat, ess, str(decision))


def _warn_missing(names: list[str]) -> None:
    message = (
        f"Draws of this posterior will not include {', '.join(names)}, because a file cannot store the functions that "
        "compute them. Load the posterior with its target: ddnf.load(path, target=...)."
    )
    warnings.warn(message, UserWarning, stacklevel=3)


def _flow(header, arrays: dict[str, np.ndarray], like) -> AbstractBijection:
    if header["flow"] is None and like is None:
        raise ValueError(header["reason"])
    held = {name[4:]: array for name, array in arrays.items() if name.startswith("flow")}
    check_finite(held.values())
    return restore(header["flow"], held) if like is None else unpack(like, held)
