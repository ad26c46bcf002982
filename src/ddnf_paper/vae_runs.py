"""Which auto-encoders are run on which images, and the settings that a search on validation images chooses for them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ddnf.vae import Pixels
from ddnf_paper.experiment import Profile, Record
from ddnf_paper.vae_models import MODELS

CLEAR_GAIN = 0.5
"""Nats by which a value must be lower to count where there is one seed. Seeds of one model differ by less with 40
latent dimensions, and by up to two nats with 2."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Which models are run on which images, and how."""

    sets: tuple[str, ...] = ("mnist-40", "omniglot-40", "mnist-2")
    models: tuple[str, ...] = tuple(MODELS)
    epochs: int = 100
    seeds: int = 1
    more_seeds: int = 3
    models_of_more_seeds: tuple[str, ...] = ("plain", "householder+context", "naf+context", "ddnf", "ddnf+context")
    search_sets: tuple[str, ...] = ("mnist-2", "mnist-40")
    search_epochs: int = 30
    search_rates: tuple[float, ...] = (5e-4, 2e-3)
    long_sets: tuple[str, ...] = ("mnist-2", "omniglot-40", "mnist-40")
    long_models: tuple[str, ...] = ("plain", "planar", "ddnf", "ddnf+context", "naf+context")
    long_epochs: int = 400
    long_seeds: int = 3
    batch: int = 100
    rate: float = 1e-3
    optimizer: Literal["adam", "sgd"] = "adam"
    average: float = 0.9997
    pixels: Pixels = "dynamic"
    train_images: int | None = None
    test_images: int | None = None
    draws: int = 10
    importance_draws: int = 500
    importance_images: int = 1000


_SMOKE = Config(
    sets=("small-2",),
    models=("plain", "ddnf+context"),
    epochs=2,
    more_seeds=0,
    search_sets=("small-2",),
    search_epochs=1,
    search_rates=(),
    long_sets=("small-2",),
    long_models=("plain",),
    long_epochs=3,
    long_seeds=1,
    train_images=1000,
    test_images=200,
    importance_draws=50,
    importance_images=100,
)
PROFILES: dict[Profile, Config] = {
    "smoke": _SMOKE,
    "quick": dataclasses.replace(
        _SMOKE,
        models=("plain", "planar", "ddnf+context"),
        epochs=10,
        long_models=(),
        train_images=5000,
        test_images=1000,
        importance_draws=500,
    ),
    "full": Config(),
}


class Setting(NamedTuple):
    """What the search chooses for a model: the learning rate, and the size of its flow (see `Model.size`)."""

    rate: float
    size: int | None


class Run(NamedTuple):
    """One run: a model on a set of images with a latent dimension, from a seed; runs of the search have a setting."""

    set: str
    model: str
    epochs: int
    seed: int
    setting: Setting | None = None

    @property
    def name(self) -> str:
        name = f"{self.set}, {self.model}, {self.epochs} epochs, seed {self.seed}"
        return name if self.setting is None else f"{name}, {setting_text(self.model, self.setting)}"

    @property
    def dataset(self) -> str:
        return self.set.rpartition("-")[0]

    @property
    def latent(self) -> int:
        return _latent(self.set)


def setting_text(model: str, setting: Setting) -> str:
    """A setting in words.

    Example:
        >>> setting_text("planar", Setting(0.002, 8)), setting_text("plain", Setting(0.001, None))
        ('rate 0.002, 8 layers', 'rate 0.001')
    """
    size = "" if setting.size is None else f", {setting.size} {MODELS[model].unit}"
    return f"rate {setting.rate:g}{size}"


def runs(config: Config) -> list[Run]:
    """All runs: every model once, the search, more seeds of some models, then the long runs, which need the search.

    The order of the long runs makes the most of an unfinished profile: one seed of everything comes first.

    Example:
        >>> [run.name for run in runs(PROFILES["smoke"])][1:3]
        ['small-2, ddnf+context, 2 epochs, seed 0', 'small-2, plain, 1 epochs, seed 0, rate 0.001']
    """
    once = [Run(s, m, config.epochs, seed) for s in config.sets for m in config.models for seed in range(config.seeds)]
    seeds = range(config.seeds, config.more_seeds)
    more = [Run(s, m, config.epochs, seed) for s in config.sets for m in config.models_of_more_seeds for seed in seeds]
    search = [run for where in config.search_sets for m in config.long_models for run in _search(config, where, m)]
    return once + search + more + long_runs(config)


def candidates(config: Config, model: str) -> list[Setting]:
    """The settings that are searched: the default first, then other rates, then half and twice the size.

    Example:
        >>> [tuple(setting) for setting in candidates(Config(), "planar")]
        [(0.001, 8), (0.0005, 8), (0.002, 8), (0.001, 4), (0.001, 16)]
    """
    size = MODELS[model].size
    sizes = [] if size is None else [size // 2, 2 * size]
    rates = [config.rate, *config.search_rates]
    return [Setting(rate, size) for rate in rates] + [Setting(config.rate, other) for other in sizes]


def chosen(config: Config, done: Mapping[str, Any], where: str, model: str) -> Setting | None:
    """The setting of a model's long runs on a set, from the finished parts; None until the search is complete.

    Rate and size are chosen separately. Each stays at its default unless another has a validation value that is lower
    by at least `CLEAR_GAIN`. The search is that of the set with the same latent dimension.
    """
    found = search_values(config, done, searched_set(config, where), model)
    if None in found.values():
        return None
    default = candidates(config, model)[0]

    def best(options: list[Setting]) -> Setting:
        lowest = min(options, key=lambda setting: found[setting])
        return lowest if found[default] - found[lowest] >= CLEAR_GAIN else default

    rate = best([setting for setting in found if setting.size == default.size]).rate
    return Setting(rate, best([setting for setting in found if setting.rate == default.rate]).size)


def search_values(config: Config, done: Mapping[str, Any], where: str, model: str) -> dict[Setting, Any]:
    """The lowest -ELBO on validation images by setting; None for what is not done, infinity for a failed run."""

    def value(run: Run) -> float | None:
        if run.name not in done:
            return None
        lowest = done[run.name]["valid"]
        return math.inf if lowest is None else lowest

    return {run.setting: value(run) for run in _search(config, where, model) if run.setting is not None}


def searched_set(config: Config, where: str) -> str:
    """The set whose search gives the settings of a set: that with the same latent dimension.

    Example:
        >>> searched_set(Config(), "omniglot-40")
        'mnist-40'
    """
    return next(name for name in config.search_sets if _latent(name) == _latent(where))


def is_current(config: Config, done: Mapping[str, Any], name: str) -> bool:
    """Whether a finished part is what would be run now: False for a long run with another setting than the chosen."""
    part = done[name]
    if not any(run.name == name for run in long_runs(config)):
        return True
    setting = chosen(config, done, part["set"], part["model"])
    return setting is None or setting == Setting(part["rate"], part["size"])


def groups(record: Record) -> dict[tuple[str, int], dict[str, list[dict[str, Any]]]]:
    """The evaluated runs by set and epochs, then by model in the order of the models; seeds together.

    Runs of the search are left out, and long runs whose setting is not the chosen one.
    """
    config, done = config_of(record), record["parts"]
    names = [name for name, part in done.items() if "negative_elbo" in part and is_current(config, done, name)]
    parts = sorted((done[name] for name in names), key=lambda part: (list(MODELS).index(part["model"]), part["seed"]))
    found: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    for part in parts:
        found.setdefault((part["set"], part["epochs"]), {}).setdefault(part["model"], []).append(part)
    return dict(sorted(found.items(), key=lambda group: (group[0][1], group[0][0] != "mnist-40", group[0][0])))


def config_of(record: Record) -> Config:
    """The settings of a record."""
    settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in record["config"].items()}
    return Config(**settings)


def long_runs(config: Config) -> list[Run]:
    """The long runs; their settings are those that the search chooses."""
    return [
        Run(where, model, config.long_epochs, seed)
        for seed in range(config.long_seeds)
        for where in config.long_sets
        for model in config.long_models
    ]


def _search(config: Config, where: str, model: str) -> list[Run]:
    return [Run(where, model, config.search_epochs, 0, setting) for setting in candidates(config, model)]


def _latent(where: str) -> int:
    return int(where.rpartition("-")[2])
