"""scikit-learn: a density estimator that follows its conventions, for pipelines and parameter searches."""

import warnings
from typing import Any

import jax.random as jr
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from ddnf.density import default_flow, fit_density
from ddnf.density.frames import library_of, read_columns
from ddnf.density.prepare import prepare
from ddnf.density.rows import FEWEST_ROWS
from ddnf.density.schema import field_of
from ddnf.system.optional import require

sklearn = require("sklearn", "sklearn")
base = require("sklearn.base", "sklearn")
utils = require("sklearn.utils", "sklearn")
validation_tools = require("sklearn.utils.validation", "sklearn")


class DDNFDensity(base.DensityMixin, base.BaseEstimator):
    """A density fitted by maximum likelihood, as a scikit-learn estimator; see `ddnf.fit_density`.

    Args:
        blocks: velocity fields of the flow, K; None for the default.
        flow_steps: steps of each field, T; None for the default.
        hidden: widths of the fields' hidden layers; None for a default by the number of columns.
        activation: of the fields.
        support: support of the columns: "real", "positive", "unit", "integer", "count" or (low, high); one for all, a
            list, or a dict from column numbers or names.
        steps: largest number of training steps; None for 2,000 to 5,000, by the number of rows.
        batch: rows per training step.
        learning_rate: peak learning rate of Adam; None for the default of `fit_density`.
        validation: rows to hold out for early stopping: a share, or a number of rows.
        patience: stop after so many validations without improvement.
        missing: "raise" or "drop": what `fit` does with rows in which a value is missing.
        random_state: an integer for the same fit each time, a `RandomState`, or None for NumPy's global one.
        verbose: whether to show a progress bar.
        iterations: deprecated name of `steps`.

    Attributes:
        density_: the fitted `ddnf.Density`.
        n_features_in_: number of columns.
        feature_names_in_: their names, where `fit` was given a table with names.

    Example:
        >>> import numpy as np
        >>> x = np.random.default_rng(0).normal(size=(40, 2))
        >>> model = DDNFDensity(blocks=1, hidden=(2,), steps=5, random_state=0).fit(x)
        >>> model.score_samples(x).shape, model.sample(3, random_state=1).shape
        ((40,), (3, 2))
    """

    density_: Any
    n_features_in_: int

    # No annotations: scikit-learn wants settings to be checked by `fit`, not here.
    def __init__(
        self,
        blocks=None,
        flow_steps=None,
        hidden=None,
        activation="softplus",
        support=None,
        steps=None,
        batch=256,
        learning_rate=None,
        validation=0.1,
        patience=10,
        missing="raise",
        random_state=None,
        verbose=False,
        iterations=None,
    ):
        self.blocks = blocks
        self.flow_steps = flow_steps
        self.hidden = hidden
        self.activation = activation
        self.support = support
        self.steps = steps
        self.batch = batch
        self.learning_rate = learning_rate
        self.validation = validation
        self.patience = patience
        self.missing = missing
        self.random_state = random_state
        self.verbose = verbose
        self.iterations = iterations

    def fit(self, X: Any, y: Any = None) -> "DDNFDensity":
        """Fits the density to rows (n, columns); `y` is ignored."""
        X, names = self._table(X, reset=True)
        flow_key, fit_key = jr.split(_key(self.random_state))
        self.density_ = fit_density(
            fit_key,
            X,
            names=names,
            missing=self.missing,
            flow=self._flow(flow_key, X, names),
            adaptive=True,
            support=self.support,
            validation=self.validation,
            steps=self._training_steps(),
            batch=self.batch,
            learning_rate=self.learning_rate,
            patience=self.patience,
            progress=bool(self.verbose),
        )
        return self

    def _flow(self, key, X, names):
        """A flow of these settings; None, for the default of `fit_density`, if all are left as they are."""
        if (self.blocks, self.flow_steps, self.hidden, self.activation) == (None, None, None, "softplus"):
            return None
        table = prepare(X, None, missing=self.missing, names=names)
        given_dim = None if table.given is None else table.given.shape[1]
        sizes: dict[str, Any] = dict(blocks=self.blocks, steps=self.flow_steps, hidden=self.hidden)
        return default_flow(key, table.rows.shape[1], given_dim, activation=self.activation, **sizes)

    def _table(self, X, *, reset):
        """A frame as it is, if it has other columns than numbers; else an array, and the names of its columns."""
        is_frame = library_of(X) in ("pandas", "polars")
        if is_frame and (_is_mixed(X) if reset else self.density_.schema is not None):
            validation_tools.validate_data(self, X, skip_check_array=True, reset=reset)
            return X, None
        some = {} if self.missing == "raise" or not reset else dict(ensure_all_finite="allow-nan")
        least = dict(ensure_min_samples=FEWEST_ROWS) if reset else {}
        X = validation_tools.validate_data(self, X, dtype=np.float64, reset=reset, **least, **some)
        names = getattr(self, "feature_names_in_", None)
        return X, None if names is None else [str(name) for name in names]

    def set_output(self, *, transform: str | None = None) -> "DDNFDensity":
        """Chooses what `sample` returns: "default" (arrays; of mixed columns the frame fitted), "pandas", "polars"."""
        if transform not in (None, "default", "pandas", "polars"):
            raise ValueError(f"Expected transform to be 'default', 'pandas' or 'polars'; got {transform!r}.")
        if transform is not None:
            self._output = transform
        return self

    def _training_steps(self):
        if self.iterations is None:
            return self.steps
        message = "DDNFDensity(iterations=) is deprecated: use steps=. What was steps= is now flow_steps=."
        warnings.warn(message, FutureWarning, stacklevel=3)
        return self.iterations

    def score_samples(self, X: Any) -> Float[np.ndarray, " n"]:
        """The log density of each row; -inf outside of the support."""
        validation_tools.check_is_fitted(self)
        X, _ = self._table(X, reset=False)
        return np.asarray(self.density_.log_prob(X), np.float64)

    def score(self, X: Any, y: Any = None) -> float:
        """The log-likelihood of all rows together, as scikit-learn's `KernelDensity` has it; `y` is ignored."""
        return float(np.sum(self.score_samples(X)))

    def sample(self, n_samples: int = 1, random_state: int | np.random.RandomState | None = None) -> Any:
        """Draws from the density, a row each: an array, or a frame; see `set_output`."""
        validation_tools.check_is_fitted(self)
        draws = self.density_.sample(_key(random_state), n_samples)
        kind = getattr(self, "_output", None) or sklearn.get_config()["transform_output"]
        if kind == "default":
            return np.asarray(draws, np.float64) if isinstance(draws, np.ndarray) else draws
        names = self.density_.names or [f"x{i}" for i in range(self.n_features_in_)]
        columns = read_columns(draws) if library_of(draws) is not None else None
        values = (
            dict(zip(names, draws.T, strict=True)) if columns is None else {n: c.values for n, c in columns.items()}
        )
        return draws if library_of(draws) == kind else require(kind, "frames").DataFrame(values)


def _is_mixed(frame):
    return any(field_of(name, raw).kind != "number" for name, raw in read_columns(frame).items())


def _key(random_state) -> PRNGKeyArray:
    return jr.key(utils.check_random_state(random_state).randint(np.iinfo(np.int32).max))
