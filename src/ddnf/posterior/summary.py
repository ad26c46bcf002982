"""A table of the marginal of each parameter."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ddnf.posterior.convergence import convergence

COLUMNS = ("mean", "sd", "5%", "50%", "95%")
CHAIN_COLUMNS = ("ess_bulk", "ess_tail", "rhat")


class Summary(NamedTuple):
    """A table with mean, deviation and quantiles of each scalar parameter, and the figures of the fit.

    Example:
        >>> print(summarize({"a": np.arange(5.0)}, dict(khat=0.1)))
        khat 0.1
        <BLANKLINE>
                         mean           sd           5%          50%          95%
        a                   2        1.414          0.2            2          3.8
    """

    rows: dict[str, dict[str, float]]
    figures: dict[str, float]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(next(iter(self.rows.values()), COLUMNS))

    def __str__(self):
        columns = self.columns
        width = max([8, *(len(name) for name in self.rows)])
        head = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        lines = [" " * width + "".join(f"{column:>13}" for column in columns).rstrip()]
        for name, row in self.rows.items():
            lines.append(f"{name:<{width}}" + "".join(f"{row[column]:>13.4g}" for column in columns))
        return "\n".join([head, "", *lines])

    def _repr_html_(self):
        head = "".join(f"<th>{column}</th>" for column in self.columns)
        body = "".join(
            f"<tr><th>{name}</th>" + "".join(f"<td>{row[column]:.4g}</td>" for column in self.columns) + "</tr>"
            for name, row in self.rows.items()
        )
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return f"<p>{figures}</p><table><tr><th></th>{head}</tr>{body}</table>"


def summarize(draws: Any, figures: dict[str, float], *, chains: int | None = None) -> Summary:
    """Summarizes draws: a dict of arrays (n, ...), or one array (n, dim); with convergence if they are of chains."""
    named = scalars(draws if isinstance(draws, Mapping) else {"z": draws})
    rows = {name: _row(values) for name, values in named.items()}
    if chains is not None:
        found = convergence(np.stack([values.reshape(chains, -1) for values in named.values()], axis=-1))
        for number, row in enumerate(rows.values()):
            row |= {name: float(getattr(found, name)[number]) for name in CHAIN_COLUMNS}
    return Summary(rows, figures)


def scalars(draws: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays (n, ...) as scalar parameters (n,), with indices in their names.

    Example:
        >>> list(scalars({"mu": np.zeros(3), "theta": np.zeros((3, 2))}))
        ['mu', 'theta[0]', 'theta[1]']
    """
    named = {}
    for name, values in draws.items():
        values = np.asarray(values, float)
        for index in np.ndindex(values.shape[1:]):
            label = f"[{', '.join(map(str, index))}]" if index else ""
            named[name + label] = values[(slice(None), *index)]
    return named


def _row(values) -> dict[str, float]:
    quantiles = np.quantile(values, [0.05, 0.5, 0.95])
    return dict(zip(COLUMNS, map(float, (values.mean(), values.std(), *quantiles)), strict=True))
