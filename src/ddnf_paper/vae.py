"""Variational auto-encoders on images (the paper's Tables 1 and 3): one encoder and decoder, many posteriors."""

import base64
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from ddnf import VAE, fit_vae, judge_vae
from ddnf.vae import Trained
from ddnf_paper import vae_claims, vae_shown
from ddnf_paper.experiment import Experiment, Profile
from ddnf_paper.models import count_parameters
from ddnf_paper.targets import images
from ddnf_paper.vae_models import MODELS, make
from ddnf_paper.vae_runs import PROFILES, Config, Run, Setting, candidates, chosen, is_current, long_runs, runs

ABOUT = """The networks of Appendix C (one hidden layer of 128 tanh units in encoder and decoder, batches of 100, Adam
with a learning rate of 0.001), with different posteriors. In training, pixels are re-binarised every epoch with the
probability of their grey value. The tables use one fixed binarisation of the test images, the published one for MNIST
and our own for the others. A validation split selects the epoch. The paper selects it on the test set; this value is
also shown. Validation and evaluation use a moving average of the parameters (over about 3,000 steps), which the paper
does not use; it removes the noise of the constant learning rate. Every -ELBO uses the exact log-determinant, and the
tables give the share of cells that fold on the test images. If training used an estimate, the estimate is also shown.
"+ context" means the same for all models: the encoder has an extra wide layer, which feeds the base Gaussian and gives
the flow a context of 64 numbers; "plain VAE + context" is that encoder without a flow. DDNF has blocks of one step
and 8 units (16 blocks unless the search for settings chooses otherwise), and a Lipschitz bound that prevents folds.
-log p(x) is estimated by importance-weighted draws. Its difference from the -ELBO on the same images is the most that a
better posterior could gain with that decoder. Runs of 400 epochs are the paper's five rows; the same search on
validation images chooses the learning rate and size of all five. Runs of 100 epochs have default settings: those of
DDNF (blocks, units, size of the context), the initialisation of the decoder and the moving average were chosen by test
values on MNIST with 40 latent dimensions; the settings of the baselines were not tuned."""


def parts(config: Config, seed: int) -> dict[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]]:
    """One part per run; each takes a folder for its checkpoints, and the parts done so far."""
    return {run.name: partial(_part, config, seed, run) for run in runs(config)}


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
        where, model, _, seed, *_ = name.split(", ")
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


def _part(config: Config, seed: int, run: Run, checkpoint: Path, done: Mapping[str, Any]) -> dict[str, Any]:
    setting = _setting(config, run, done)
    data = _load(run.dataset, config)
    pixels = config.pixels if data.is_binary else "grey"
    valid, test = (split.lit if pixels == "dynamic" else split.grey / np.float32(255) for split in data[3:5])
    model_key, fit_key, evaluate_key, picture_key = jr.split(jr.fold_in(jr.key(seed), run.seed), 4)
    mean, start = data.train.mean(axis=0) / 255, time.process_time()
    vae = make(run.model, model_key, latent=run.latent, mean=mean, is_binary=data.is_binary, size=setting.size)
    with warnings.catch_warnings():
        # The number of skipped steps is in the record.
        warnings.simplefilter("ignore", RuntimeWarning)
        trained = fit_vae(
            fit_key,
            vae,
            data.train,
            valid,
            test=None if run.setting else test,
            epochs=run.epochs,
            batch=config.batch,
            pixels=pixels,
            optimizer=_optimizer(config.optimizer, setting.rate),
            average=config.average,
            checkpoint=checkpoint,
            description=run.name,
        )
    seconds = trained.seconds[np.isfinite(trained.seconds)]  # not of epochs before the run was resumed
    about = dict(
        **dict(set=run.set, model=run.model, epochs=run.epochs, seed=run.seed, latent=run.latent),
        **setting._asdict(),
        images=data.name,
        parameters=count_parameters(vae),
        flow_parameters=count_parameters(vae.flow),
        skipped=trained.skipped,
        epoch_seconds=float(np.median(seconds)) if len(seconds) else None,
        epoch_process_seconds=(time.process_time() - start) / len(seconds) if len(seconds) else None,
    )
    if run.setting is not None:
        return about | dict(valid=_lowest(trained.valid))
    is_shown = run.seed == 0 and run.model in vae_claims.ROWS
    pictures = _picture_data(picture_key, trained.vae.as_exact(), data, test) if is_shown else {}
    return about | _evaluated(evaluate_key, config, data, test, trained) | pictures


def _evaluated(key, config: Config, data: images.Images, test: np.ndarray, trained: Trained) -> dict[str, Any]:
    """The values of the tables, and the learning curves."""
    judged = judge_vae(
        key,
        trained.vae,
        test,
        draws=config.draws,
        importance_draws=config.importance_draws,
        importance_images=config.importance_images,
    )
    return dict(
        train_images=len(data.train),
        test_images=len(test),
        binarisation=data.binarisation,
        shape=data.shape,
        **judged._asdict(),
        gap=judged.gap,
        epoch=trained.epoch,
        best_test=float(np.nanmin(trained.test)),
        best_test_epoch=int(np.nanargmin(trained.test)) + 1,
        curves=dict(train=trained.train, valid=trained.valid, test=trained.test),
    )


def _setting(config: Config, run: Run, done: Mapping[str, Any]) -> Setting:
    """The setting of a run: its own in the search, the chosen one in a long run, else the default."""
    if run.setting is not None or run not in long_runs(config):
        return run.setting or candidates(config, run.model)[0]
    setting = chosen(config, done, run.set, run.model)
    if setting is None:
        raise ValueError(f"Expected the search for {run.model} to be complete before {run.name}; it is not.")
    return setting


def _lowest(curve: np.ndarray) -> float:
    """The lowest finite value; infinity without one."""
    return float(np.min(curve, where=np.isfinite(curve), initial=np.inf))


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
    vae_shown.tables,
    vae_shown.pictures,
    vae_claims.claims,
    has_checkpoints=True,
    is_current=is_current,
)
