"""Variational auto-encoders on images (the paper's Tables 1 and 3): every posterior around one encoder and decoder."""

import base64
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from ddnf.vae import VAE, Pixels, fit_vae, judge_vae
from ddnf_paper import vae_shown
from ddnf_paper.experiment import Experiment, Profile, Record, Table
from ddnf_paper.targets import images
from ddnf_paper.vae_models import MODELS, make, size

ABOUT = """The networks of Appendix C (one hidden tanh layer of 128 units each way, batches of 100, Adam with a rate of
0.001) with a posterior each. Pixels are lit at random with the probability of their grey value, anew for each epoch
of training; the tables are for one fixed binarisation of the test images, published for MNIST and drawn here for
the others. A validation split picks the epoch; the paper takes the best epoch on the test set, which stands beside
it. What is validated and judged is a moving average of the parameters (over some 3,000 steps), which the paper does
not have: it takes out the noise of the constant rate. Every -ELBO is by the exact log-determinant, and the share of
cells that fold on the test images stands beside it; the estimate that has trained a model is shown where it is
another one. "+ context" means one and the same for all models: the encoder has a wide layer more, which moves the base
Gaussian and gives the flow a signal of 64 numbers; "plain VAE + context" is that encoder without any flow. DDNF is
ours: 16 blocks of one cell and 8 units, kept from folding by a bound on the fields. -log p(x) is by importance-weighted
draws: what is left between it and the -ELBO on the same images a better posterior could still gain for that decoder.
The settings of DDNF (blocks, units, size of the context), the start of the decoder and the average were chosen by test
values of MNIST with 40 latent dimensions in runs of up to 100 epochs; those of the baselines were not tuned."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What is run, and how."""

    sets: tuple[str, ...] = ("mnist-40", "omniglot-40", "mnist-2")
    models: tuple[str, ...] = tuple(MODELS)
    epochs: int = 100
    seeds: int = 1
    more_seeds: int = 3
    models_of_more_seeds: tuple[str, ...] = ("plain", "naf+context", "ddnf", "ddnf+context")
    long_set: str = "mnist-40"
    long_epochs: int = 400
    long_models: tuple[str, ...] = ("plain", "naf+context", "ddnf+context")
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
    long_models=(),
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
        train_images=5000,
        test_images=1000,
        importance_draws=500,
    ),
    "full": Config(),
}


class Run(NamedTuple):
    """One run: a model on a set with a latent dimension, from a seed."""

    set: str
    model: str
    epochs: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.set}, {self.model}, {self.epochs} epochs, seed {self.seed}"

    @property
    def dataset(self) -> str:
        return self.set.rpartition("-")[0]

    @property
    def latent(self) -> int:
        return int(self.set.rpartition("-")[2])


def runs(config: Config) -> list[Run]:
    """All runs: every model once, then more seeds of some, and long ones.

    Example:
        >>> [run.name for run in runs(PROFILES["smoke"])]
        ['small-2, plain, 2 epochs, seed 0', 'small-2, ddnf+context, 2 epochs, seed 0']
    """
    once = [Run(s, m, config.epochs, seed) for s in config.sets for m in config.models for seed in range(config.seeds)]
    seeds = range(config.seeds, config.more_seeds)
    more = [Run(s, m, config.epochs, seed) for s in config.sets for m in config.models_of_more_seeds for seed in seeds]
    return once + [Run(config.long_set, m, config.long_epochs, 0) for m in config.long_models] + more


def parts(config: Config, seed: int) -> dict[str, Callable[[Path], dict[str, Any]]]:
    """One part for each run; each is given a folder for its checkpoints."""
    return {run.name: partial(_part, config, seed, run) for run in runs(config)}


def tables(record: Record) -> list[Table]:
    """The tables, with how many of the runs are in them."""
    settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in record["config"].items()}
    planned, done = len(runs(Config(**settings))), len(record["parts"])
    missing = "" if done == planned else f" So far {done} of {planned} runs of this profile are done."
    return [table._replace(caption=table.caption + missing) for table in vae_shown.tables(record)]


def choose(models: Sequence[str], seeds: Sequence[int], datasets: Sequence[str]) -> Callable[[str], bool]:
    """Which runs to do, by name: those of these models, seeds and sets; nothing given is no limit.

    Example:
        >>> wanted = choose(["plain"], [], ["mnist"])
        >>> wanted("mnist-40, plain, 100 epochs, seed 0"), wanted("mnist-40, naf, 100 epochs, seed 0")
        (True, False)
    """
    for model in models:
        if model not in MODELS:
            raise ValueError(f"Expected models of {', '.join(MODELS)}; got {model!r}.")

    def wanted(name: str) -> bool:
        where, model, _, seed = name.split(", ")
        return (
            (not models or model in models)
            and (not seeds or int(seed.removeprefix("seed ")) in seeds)
            and (not datasets or where in datasets or where.rpartition("-")[0] in datasets)
        )

    return wanted


def changes(profile: Profile, *, optimizer: str, pixels: str, datasets: Sequence[str]) -> dict[str, Any]:
    """Settings that differ from those of the profile; sets that it does not have are run alone.

    Example:
        >>> changes("full", optimizer="sgd", pixels="dynamic", datasets=["frey-20"])
        {'optimizer': 'sgd', 'sets': ('frey-20',)}
    """
    config = PROFILES[profile]
    asked = dict(optimizer=optimizer, pixels=pixels)
    known = {*config.sets, *(name.rpartition("-")[0] for name in config.sets)}
    if any(name not in known for name in datasets):
        for name in datasets:
            kind, _, latent = name.rpartition("-")
            if kind not in images.SETS or not latent.isdecimal() or int(latent) < 1:
                raise ValueError(f"Expected sets like {', '.join((*config.sets, 'frey-20'))}; got {name!r}.")
        asked |= dict(sets=tuple(datasets))
    return {name: value for name, value in asked.items() if getattr(config, name) != value}


def _part(config: Config, seed: int, run: Run, checkpoint: Path) -> dict[str, Any]:
    data = _loaded(run.dataset, config)
    pixels = config.pixels if data.is_binary else "grey"
    valid, test = (split.lit if pixels == "dynamic" else split.grey / np.float32(255) for split in data[3:5])
    model_key, fit_key, judge_key, show_key = jr.split(jr.fold_in(jr.key(seed), run.seed), 4)
    vae = make(run.model, model_key, latent=run.latent, mean=data.train.mean(axis=0) / 255, is_binary=data.is_binary)
    with warnings.catch_warnings():
        # What was skipped is in the record.
        warnings.simplefilter("ignore", RuntimeWarning)
        trained = fit_vae(
            fit_key,
            vae,
            data.train,
            valid,
            test=test,
            epochs=run.epochs,
            batch=config.batch,
            pixels=pixels,
            optimizer=_optimizer(config.optimizer, config.rate),
            average=config.average,
            checkpoint=checkpoint,
            description=run.name,
        )
    judged = judge_vae(
        judge_key,
        trained.vae,
        test,
        draws=config.draws,
        importance_draws=config.importance_draws,
        importance_images=config.importance_images,
    )
    return dict(
        **run._asdict(),
        images=data.name,
        train_images=len(data.train),
        test_images=len(test),
        binarisation=data.binarisation,
        shape=data.shape,
        latent=run.latent,
        parameters=size(vae),
        flow_parameters=size(vae.flow),
        **judged._asdict(),
        gap=judged.gap,
        epoch=trained.epoch,
        best_test=float(np.nanmin(trained.test)),
        best_test_epoch=int(np.nanargmin(trained.test)) + 1,
        skipped=trained.skipped,
        epoch_seconds=float(np.nanmedian(trained.seconds[1:])) if len(trained.seconds) > 1 else None,
        curves=dict(train=trained.train, valid=trained.valid, test=trained.test),
        **(_shown(show_key, trained.vae.as_exact(), data, test) if run.seed == 0 else {}),
    )


def _loaded(name: str, config: Config) -> images.Images:
    """The images, or as many of them as are wanted; "small" is whatever needs no download."""
    data = images.load(images.best_at_hand() if name == "small" else name)
    some = np.linspace(0, len(data.test.grey) - 1, config.test_images or len(data.test.grey)).astype(int)
    return data._replace(
        train=data.train[: config.train_images],
        valid=images.Split(*(a[: config.test_images] for a in data.valid)),
        test=images.Split(*(a[some] for a in data.test)),
        labels=None if data.labels is None else data.labels[some],
    )


@lru_cache
def _optimizer(name: str, rate: float) -> optax.GradientTransformation:
    return optax.flatten(optax.adam(rate) if name == "adam" else optax.sgd(rate))


def _shown(key, vae: VAE, data: images.Images, test: np.ndarray) -> dict[str, Any]:
    """What a picture is to show: images as bytes, and points of a latent plane before and after the flow."""
    sample_key, again_key, plane_key = jr.split(key, 3)
    some = np.linspace(0, len(test) - 1, 10).astype(int)
    given = jnp.asarray(test[some], jnp.result_type(float))
    samples, again = eqx.filter_jit(lambda vae: (vae.sample(sample_key, 20), vae.reconstruct(again_key, given)))(vae)
    shown = dict(samples=_bytes(samples), given=_bytes(given), again=_bytes(again))
    if data.labels is not None and vae.latent == 2:
        many = np.linspace(0, len(test) - 1, 1500).astype(int)
        before, after = _plane(vae, plane_key, jnp.asarray(test[many], jnp.result_type(float)))
        shown |= dict(plane=dict(before=before, after=after, labels=data.labels[many]))
    return shown


@eqx.filter_jit
def _plane(vae: VAE, key, x):
    def one(key, x):
        code = vae.code(x)
        z = code.mean + jnp.exp(code.log_scale) * jr.normal(key, code.mean.shape)
        return z, vae.apply_flow(z, code)[0]

    return jax.vmap(one)(jr.split(key, len(x)), x)


def _bytes(values) -> str:
    """Images with values in [0, 1], as text."""
    return base64.b64encode(np.round(255 * np.asarray(values)).astype(np.uint8).tobytes()).decode()


EXPERIMENT = Experiment(
    "vae",
    "Variational auto-encoders",
    ABOUT,
    PROFILES,
    parts,
    tables,
    vae_shown.pictures,
    vae_shown.claims,
    has_checkpoints=True,
)
