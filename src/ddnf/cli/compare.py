"""`ddnf compare`: models side by side on one target."""

import dataclasses
from pathlib import Path

from ddnf.cli.options import Output


def compare(
    *,
    target: str,
    models: tuple[str, ...] = ("all",),
    layers: tuple[int, ...] = (2,),
    output: Output = Path("results"),
    dim: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    learning_rate: float | None = None,
    size: int | None = None,
    starts: int | None = None,
    seed: int = 0,
    resume: bool = True,
) -> None:
    """Fits models to one target or table, and compares the results.

    Args:
        target: energy1 or energy2 (the paper's), table2 or textbook (the cancer posterior), a table such as data.csv,
            or your own log density as file.py:name.
        models: names of models, such as ddnf planar naf; or all.
        layers: numbers of layers, K.
        output: folder for the results and the picture. Files that ddnf did not write are never overwritten.
        dim: dimension of your own log density.
        steps: training steps per fit.
        batch: draws or rows per step.
        learning_rate: peak learning rate of Adam; by default, each model has its own.
        size: width of the baselines; by default, each has its own.
        starts: number of fits per model, from different initial weights; the best is reported.
        seed: random seed.
        resume: keep results in the folder that have the same settings and seed; otherwise start over.
    """
    from ddnf_paper import side_by_side

    subject = side_by_side.subject_of(target, dim=dim, seed=seed)
    chosen = dict(steps=steps, batch=batch, learning_rate=learning_rate, size=size, starts=starts)
    settings = dataclasses.replace(subject.settings, **{k: v for k, v in chosen.items() if v is not None})
    side_by_side.compare(subject, models, layers, out=output, settings=settings, seed=seed, resume=resume)
