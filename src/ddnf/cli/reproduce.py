"""`ddnf reproduce`: the paper's experiments."""

import os
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ddnf.cli.options import key_from_seed
from ddnf.system.optional import require


def reproduce(
    names: Positional[tuple[str, ...]] = ("all",),
    /,
    *,
    profile: Literal["smoke", "quick", "full"] = "quick",
    output: Annotated[Path, arg(name="out", aliases=["-o"])] = Path("results"),
    resume: bool = True,
    again: bool = False,
    seed: int = 0,
    models: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (),
    dataset: tuple[str, ...] = (),
    optimizer: Literal["adam", "sgd"] = "adam",
    pixels: Literal["dynamic", "grey"] = "dynamic",
    data: Path | None = None,
) -> None:
    """Runs the paper's experiments, and writes results (JSON), figures and a report.

    Args:
        names: experiments to run: accuracy, illustration, toy, posterior, vae, regularization,
            inverse-consistency, open-questions; or all.
        profile: smoke (seconds), quick (minutes) or full (the paper's settings).
        output: folder for results, figures and the report. Files that ddnf did not write are never overwritten.
        resume: keep parts in the folder that have the same settings and seed; otherwise start over.
        seed: random seed.
        again: rerun these experiments, or only the parts selected by the options below, and keep the others.
        models: run only these auto-encoders, such as plain ddnf+context; without vae, only these models of the toy
            energies.
        seeds: run only these seeds of the auto-encoders.
        dataset: run the auto-encoders only on these images, such as mnist or mnist-2; or on another set with a given
            latent dimension, such as frey-20.
        optimizer: optimizer of the auto-encoders.
        pixels: training data of the auto-encoders: pixels re-binarised every epoch (dynamic), or grey values.
        data: folder with the image files; by default the environment variable DDNF_DATA.
    """
    require("matplotlib", "paper")
    from ddnf_paper import reproduce as paper
    from ddnf_paper import toy, vae
    from ddnf_paper.compiling import compile_quickly

    if profile == "smoke":
        compile_quickly()
    key_from_seed(seed)
    if data is not None:
        if not data.is_dir():
            raise ValueError(f"Expected a folder with data; got {str(data)!r}.")
        os.environ["DDNF_DATA"] = str(data)
    if "vae" in paper.choose(names):
        wanted = dict(vae=vae.choose(models, seeds, dataset))
    else:
        wanted = dict(toy=toy.choose(models))
    figures = paper.reproduce(
        names,
        output,
        profile=profile,
        seed=seed,
        resume=resume,
        again=again,
        wanted=wanted,
        changes=dict(vae=vae.changes(profile, optimizer=optimizer, pixels=pixels, datasets=dataset)),
    )
    page = paper.report(output)
    print(f"results         {', '.join(str(output / f'{name}.json') for name in figures)}")
    print(f"figures         {', '.join(str(path) for paths in figures.values() for path in paths)}")
    if page is not None:
        print(f"report          {page}")
