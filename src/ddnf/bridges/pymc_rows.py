"""PyMC's minibatches as rows: the log-likelihood of some of them, and the log prior."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddnf.posterior.rows import Rows
from ddnf.system.optional import require


def minibatch_rows(model: Any, jaxified: Callable, unravel: Callable, dim: int) -> Rows | None:
    """The rows of a model with `pm.Minibatch`; None for a model without.

    Args:
        model: the PyMC model.
        jaxified: from inputs and outputs to a function from lists of arrays to lists of arrays.
        unravel: from a point to the values of the model's variables.
        dim: dimension of a point.
    """
    sampled = [rv for rv in model.observed_RVs if _is_scaled(rv)]
    outputs = model.logp(vars=sampled, sum=False) if sampled else []
    nodes = _minibatches(outputs)
    prior = model.logp(vars=[v for v in (*model.basic_RVs, *model.potentials) if v not in sampled])
    if _minibatches([prior]):
        raise ValueError("Expected total_size for every observed variable with a Minibatch; got one without.")
    if not sampled:
        return None
    size, batch = _size(nodes, sampled), nodes[0].outputs[0].type.shape[0]
    numbers = require("pytensor.tensor", "pymc").TensorType("int64", (batch,))("rows")
    pairs = (pair for node in nodes for pair in zip(node.outputs[:-1], node.inputs[:-1], strict=True))
    chosen = {out: source[numbers].astype(out.dtype) for out, source in pairs}
    replaced = require("pytensor.graph.replace", "pymc").clone_replace(outputs, chosen)
    by_row, log_prior = jaxified([*model.value_vars, numbers], replaced), jaxified(model.value_vars, [prior])

    def of_batch(z, rows):
        parts = by_row([*unravel(z), rows])
        total = jnp.stack([part.reshape(batch, -1).sum(axis=1) for part in parts]).sum(axis=0)
        return total.astype(z.dtype) * (batch / size)

    def log_likelihood(z, rows):
        # The size of the minibatch appears in many places of the graph, so rows come in batches of that size.
        batches = jnp.resize(rows, (-(-len(rows) // batch), batch))
        return jax.vmap(of_batch, (None, 0))(z, batches).reshape(-1)[: len(rows)]

    return Rows(lambda z: log_prior(unravel(z))[0].astype(z.dtype), log_likelihood, np.arange(size), dim, batch)


def _is_scaled(rv) -> bool:
    kind = require("pymc.variational.minibatch_rv", "pymc").MinibatchRandomVariable
    return rv.owner is not None and isinstance(rv.owner.op, kind)


def without_minibatches(variables: list) -> list:
    """Those of some variables that do not depend on a minibatch."""
    return [variable for variable in variables if not _minibatches([variable])]


def _minibatches(outputs) -> list[Any]:
    """The nodes of a graph that draw a minibatch, each once."""
    graph, kind = require("pytensor.graph.traversal", "pymc"), require("pymc.data", "pymc").MinibatchOp
    nodes = (variable.owner for variable in graph.ancestors(outputs) if variable.owner is not None)
    return list({id(node): node for node in nodes if isinstance(node.op, kind)}.values())


def _size(nodes, sampled) -> int:
    """The number of rows, which all minibatches and total sizes must share."""
    sizes = {int(source.shape[0].eval()) for node in nodes for source in node.inputs[:-1]}
    totals = {int(rv.owner.inputs[1].eval()) for rv in sampled}
    if not nodes or not sampled or len(sizes | totals) != 1:
        got = f"minibatches of {sorted(sizes)} rows, total sizes {sorted(totals)}"
        raise ValueError(f"Expected a Minibatch and total_size of one number of rows; got {got}.")
    return sizes.pop()
